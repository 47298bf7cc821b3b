//! References within a schema document. Their targets become definitions with names of our own, so that pointers with
//! escapes, anchors and references to the root all look alike to the parser.

use std::collections::VecDeque;

use serde_json::Value;

use super::schema_error::{Place, SchemaError};

/// More different targets are an attack.
const MAX_TARGETS: usize = 4096;

pub struct Refs<'a> {
    root: &'a Value,
    /// References by the order in which they were met; the index is part of the definition's name.
    known: Vec<String>,
    /// Targets that have not been written: (name, path, schema).
    waiting: VecDeque<(String, String, Value)>,
}

impl<'a> Refs<'a> {
    pub fn new(root: &'a Value) -> Self {
        Self {
            root,
            known: Vec::new(),
            waiting: VecDeque::new(),
        }
    }

    /// The next target to be written.
    pub fn next(&mut self) -> Option<(String, String, Value)> {
        self.waiting.pop_front()
    }

    /// The reference in its new form.
    pub fn rename(&mut self, place: Place<'_>, reference: &Value) -> Result<Value, SchemaError> {
        let Some(reference) = reference.as_str() else {
            return Err(place.error("must be a string"));
        };
        let target = self.find(reference).ok_or_else(|| {
            place.error(format!(
                "refers to {reference:?}, which is not in this schema (other documents are not fetched)"
            ))
        })?;
        let known = self.known.iter().position(|other| other == reference);
        let index = match known {
            Some(index) => index,
            None if self.known.len() >= MAX_TARGETS => {
                return Err(place.error(format!("is used for more than {MAX_TARGETS} targets")));
            }
            None => {
                let index = self.known.len();
                let entry = (format!("d{index}"), reference.to_owned(), target.clone());
                self.waiting.push_back(entry);
                self.known.push(reference.to_owned());
                index
            }
        };
        Ok(Value::from(format!("#/$defs/d{index}")))
    }

    /// The schema of this document that a reference names.
    pub fn find(&self, reference: &str) -> Option<&'a Value> {
        let id = self.root.get("$id").and_then(Value::as_str).unwrap_or("");
        let fragment = reference
            .strip_prefix('#')
            .or_else(|| reference.strip_prefix(id)?.strip_prefix('#'))
            .or_else(|| (!id.is_empty() && reference == id).then_some(""))?;
        let fragment = percent_decoded(fragment)?;
        if fragment.is_empty() {
            return Some(self.root);
        }
        if fragment.starts_with('/') {
            return self.root.pointer(&fragment);
        }
        find_anchor(self.root, &fragment)
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        if *byte == b'%' {
            let digits = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

/// The schema that names itself `anchor`.
fn find_anchor<'a>(value: &'a Value, anchor: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => {
            if map.get("$anchor").and_then(Value::as_str) == Some(anchor) {
                return Some(value);
            }
            let below = map
                .iter()
                .filter(|(key, _)| *key != "enum" && *key != "const");
            below
                .into_iter()
                .find_map(|(_, value)| find_anchor(value, anchor))
        }
        Value::Array(values) => values.iter().find_map(|value| find_anchor(value, anchor)),
        _ => None,
    }
}
