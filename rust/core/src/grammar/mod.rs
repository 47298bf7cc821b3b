//! Structured outputs: which tokens a constrained sequence may take next.
//!
//! A request brings a `spec` (JSON schema, regex, choice, Lark, GBNF, structural tag). `compiler` turns it into a parser
//! on its own threads and keeps the result; every sequence has a `guide`, a clone of that parser with the sequence's
//! state; `masks` fills the bit masks of a whole batch. The parser is the `llguidance` crate, over the bytes that each
//! token of the vocabulary stands for (`vocabulary`). Not here: who waits for what (`intake`), sampling (Python).

mod choice;
pub mod compiler;
mod ebnf;
mod ebnf_lark;
pub mod guide;
mod json_schema;
mod lanes;
mod lark;
pub mod masks;
mod regex;
mod schema_error;
mod schema_names;
mod schema_refs;
mod schema_rules;
mod schema_spellings;
pub mod spec;
mod structural_tag;
pub mod vocabulary;

use thiserror::Error;

/// Why a constraint can't be used. The message names the field of `structured_outputs` and the place in it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct GrammarError(pub String);

impl GrammarError {
    /// `field`: the form, as the request names it.
    fn at(field: &str, message: impl std::fmt::Display) -> Self {
        Self(format!("structured_outputs.{field}: {message}"))
    }
}
