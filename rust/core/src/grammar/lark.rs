//! Lark text: quoting, and the schemas inside it, which are held to the same rules as any other.

use serde_json::Value;

use super::GrammarError;
use super::json_schema::{SchemaOptions, prepare};

/// Deeper brackets are an attack on the parser's stack.
const MAX_NESTING: usize = 100;

/// A Lark string literal.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A `%json` value.
pub fn json_value(schema: &Value) -> String {
    format!("%json {schema}")
}

/// Bounds how deep brackets are nested, wherever they stand.
pub fn check_nesting(field: &str, text: &str) -> Result<(), GrammarError> {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > MAX_NESTING {
        return Err(GrammarError::at(
            field,
            format!("brackets are nested {deepest} deep; at most {MAX_NESTING} are taken"),
        ));
    }
    Ok(())
}

/// The grammar with every `%json` schema made ready.
pub fn prepare_lark(text: &str, options: &SchemaOptions<'_>) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut number = 0;
    while let Some(at) = rest.find("%json") {
        let (before, after) = rest.split_at(at + "%json".len());
        out.push_str(before);
        rest = after;
        let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
        // Anything else is the grammar's own mistake, and the parser says where.
        if let Some(Ok(schema)) = values.next() {
            number += 1;
            let prepared = prepare(&schema, options)
                .map_err(|error| format!("%json number {number}: {error}"))?;
            out.push(' ');
            out.push_str(&prepared.to_string());
            rest = &after[values.byte_offset()..];
        }
    }
    out.push_str(rest);
    Ok(out)
}
