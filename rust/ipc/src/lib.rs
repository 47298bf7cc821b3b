//! Unix-socket frames between API and engine processes.
