//! What is wrong with a schema, and where.

use std::fmt;

/// What is wrong with a schema, and where (a JSON pointer).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemaError {
    pub place: String,
    pub message: String,
}

impl fmt::Display for SchemaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: {}", self.place, self.message)
    }
}

/// Where in the schema a rule looks.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub path: &'a str,
    pub keyword: &'a str,
}

impl Place<'_> {
    pub fn error(self, message: impl fmt::Display) -> SchemaError {
        SchemaError {
            place: self.path.to_owned(),
            message: format!("keyword {:?} {message}", self.keyword),
        }
    }
}
