//! What a request asks for, as JSON on the wire: exactly one form, and options beside it.
//!
//! Forms and sizes were checked where the request came from (`octavo.structured_outputs`); what is checked here is what
//! needs the whole content. Fields: one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`, then
//! `compact`, `whitespace`, `closed`, `start_after`.

use llguidance::api::TopLevelGrammar;
use serde::Deserialize;
use serde_json::{Value, json};

use super::GrammarError;
use super::choice::choice_grammar;
use super::ebnf_lark::{ebnf_to_lark, is_ebnf};
use super::json_schema::{SchemaOptions, prepare};
use super::lark::{check_nesting, prepare_lark};
use super::regex::regex_grammar;
use super::structural_tag::structural_tag_grammar;
use super::vocabulary::Vocabulary;
use crate::ids::TokenId;

/// Where free text ends and the constraint begins.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum StartAfter {
    Text(String),
    Ids(Vec<TokenId>),
}

impl StartAfter {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Ids(ids) => ids.is_empty(),
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct Spec {
    json: Option<Value>,
    json_object: bool,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    structural_tag: Option<Value>,
    compact: bool,
    whitespace: Option<String>,
    closed: bool,
    pub start_after: Option<StartAfter>,
}

impl Spec {
    pub fn parse(bytes: &[u8]) -> Result<Self, GrammarError> {
        let spec: Self = serde_json::from_slice(bytes)
            .map_err(|error| GrammarError(format!("structured_outputs: {error}")))?;
        if spec.start_after.as_ref().is_some_and(StartAfter::is_empty) {
            return Err(GrammarError::at("start_after", "must not be empty"));
        }
        Ok(spec)
    }

    /// The grammar to compile.
    pub fn grammar(&self, vocabulary: &Vocabulary) -> Result<TopLevelGrammar, GrammarError> {
        let options = self.schema_options();
        if let Some(pattern) = &self.whitespace {
            check_nesting("whitespace_pattern", pattern)?;
        }
        if let Some(schema) = &self.json {
            return prepare(schema, &options)
                .map(TopLevelGrammar::from_json_schema)
                .map_err(|error| GrammarError::at("json", error));
        }
        if self.json_object {
            return prepare(&json!({"type": "object"}), &options)
                .map(TopLevelGrammar::from_json_schema)
                .map_err(|error| GrammarError::at("json_object", error));
        }
        self.lark(vocabulary, &options)
            .map(TopLevelGrammar::from_lark)
    }

    /// Forms that become Lark.
    fn lark(
        &self,
        vocabulary: &Vocabulary,
        options: &SchemaOptions<'_>,
    ) -> Result<String, GrammarError> {
        if let Some(pattern) = &self.regex {
            check_nesting("regex", pattern)?;
            return regex_grammar(pattern).map_err(|error| GrammarError::at("regex", error));
        }
        if let Some(choices) = &self.choice {
            return choice_grammar(choices);
        }
        if let Some(text) = &self.grammar {
            check_nesting("grammar", text)?;
            return if is_ebnf(text) {
                ebnf_to_lark(text, "root").map_err(|error| GrammarError::at("grammar", error))
            } else {
                prepare_lark(text, options).map_err(|error| GrammarError::at("grammar", error))
            };
        }
        if let Some(tag) = &self.structural_tag {
            return structural_tag_grammar(tag, vocabulary, options)
                .map_err(|error| GrammarError::at("structural_tag", error));
        }
        Err(GrammarError("structured_outputs: no constraint".into()))
    }

    /// The form's name, for messages.
    pub fn form(&self) -> &'static str {
        match self {
            Self { json: Some(_), .. } => "json",
            Self { regex: Some(_), .. } => "regex",
            Self {
                choice: Some(_), ..
            } => "choice",
            Self {
                grammar: Some(_), ..
            } => "grammar",
            Self {
                structural_tag: Some(_),
                ..
            } => "structural_tag",
            _ => "json_object",
        }
    }

    pub fn schema_options(&self) -> SchemaOptions<'_> {
        SchemaOptions {
            compact: self.compact,
            whitespace: self.whitespace.as_deref(),
            closed: self.closed,
        }
    }

    /// The schema, for finding the place of an error.
    pub fn schema(&self) -> Option<&Value> {
        self.json.as_ref()
    }
}
