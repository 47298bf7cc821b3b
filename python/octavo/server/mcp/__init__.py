"""Tool servers: MCP endpoints that the operator names (`--tool-server`); requests can only choose among them."""
