"""The engine over gRPC. `octavo.proto` is the contract; everything here is imported only with --grpc-port."""
