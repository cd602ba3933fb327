//! Makes code for the independent servers of the tests from their `.proto` files, without protoc.

fn main() {}
