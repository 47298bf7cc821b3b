//! A JSON schema made ready for the parser: what it would not enforce is refused, what it reads too loosely is tightened.
//!
//! The promise is that no output violates the schema (JSON Schema 2020-12; older spellings are understood). It is kept
//! by `schema_rules` (every keyword is known and well formed, or the schema is refused with the keyword and its place)
//! and `schema_refs` (references end at a schema of the same document). Numbers beyond 2^53 are refused: the parser
//! computes with doubles.

use serde_json::{Map, Value, json};

use super::schema_error::{Place, SchemaError};
use super::schema_names;
use super::schema_refs::Refs;
use super::schema_rules::{check_keyword, check_together};
use super::schema_spellings::is_never;

/// Deeper schemas are refused.
pub const MAX_DEPTH: usize = 64;
/// Parts of a schema that are tried to find the one at fault.
const MAX_TRIALS: usize = 200;
/// Whitespace between the tokens of JSON: a blank, or a line break with some indentation; never runs of them.
const WHITESPACE: &str = r"[ ]|\r?\n[ \t]{0,16}";
/// Strings are written without `\uXXXX`: such an escape would be another spelling of a name that is taken.
const ESCAPES: &str = "nrbtf\\\"";

/// Choices of the request.
#[derive(Clone, Copy, Debug, Default)]
pub struct SchemaOptions<'a> {
    /// No whitespace.
    pub compact: bool,
    pub whitespace: Option<&'a str>,
    /// Objects that do not say otherwise take no further properties.
    pub closed: bool,
}

/// Checks and rewrites a schema (an object, a boolean, or JSON text of one).
pub fn prepare(schema: &Value, options: &SchemaOptions<'_>) -> Result<Value, SchemaError> {
    let at_root = |message: String| SchemaError {
        place: "#".into(),
        message,
    };
    let parsed;
    let schema = match schema {
        Value::String(text) => {
            parsed = serde_json::from_str(text)
                .map_err(|error| at_root(format!("the schema is not JSON: {error}")))?;
            &parsed
        }
        other => other,
    };
    prepare_part(schema, schema, options)
}

/// The same for a part of a schema document.
fn prepare_part(
    document: &Value,
    part: &Value,
    options: &SchemaOptions<'_>,
) -> Result<Value, SchemaError> {
    let mut writer = Writer {
        refs: Refs::new(document),
        options,
    };
    let mut root = match writer.schema(part, "#", 0)? {
        Value::Object(map) => map,
        Value::Bool(true) => Map::new(),
        _ => {
            return Err(SchemaError {
                place: "#".into(),
                message: "the schema is false: nothing satisfies it".into(),
            });
        }
    };
    let mut definitions = Map::new();
    // A definition may lead to further ones.
    while let Some((name, path, target)) = writer.refs.next() {
        definitions.insert(name, writer.schema(&target, &path, 0)?);
    }
    if !definitions.is_empty() {
        root.insert("$defs".into(), Value::Object(definitions));
    }
    root.insert("x-guidance".into(), parser_options(options));
    Ok(Value::Object(root))
}

/// The innermost part of a schema that `fails` (a function of the part made ready): its place and the reason.
pub fn find_fault(
    root: &Value,
    options: &SchemaOptions<'_>,
    mut fails: impl FnMut(Value) -> Option<String>,
) -> Option<SchemaError> {
    let mut budget = MAX_TRIALS;
    let mut found = None;
    let mut next = parts(root, "#");
    while let Some((place, part)) = next.pop() {
        if budget == 0 {
            break;
        }
        budget -= 1;
        let Ok(ready) = prepare_part(root, part, options) else {
            continue;
        };
        if let Some(message) = fails(ready) {
            next = parts(part, &place);
            found = Some(SchemaError { place, message });
        }
    }
    found
}

/// The schemas right below a schema, and its definitions.
fn parts<'a>(schema: &'a Value, path: &str) -> Vec<(String, &'a Value)> {
    let mut found = Vec::new();
    let Some(map) = schema.as_object() else {
        return found;
    };
    for (keyword, value) in map {
        let below = format!("{path}/{}", escaped(keyword));
        match (inside(keyword, value), value) {
            (Inside::Schema, schema) => found.push((below, schema)),
            (Inside::Schemas, Value::Object(schemas)) => found.extend(
                schemas
                    .iter()
                    .map(|(name, schema)| (format!("{below}/{}", escaped(name)), schema)),
            ),
            (Inside::Schemas, Value::Array(schemas)) => found.extend(
                (0..)
                    .zip(schemas)
                    .map(|(index, schema): (usize, _)| (format!("{below}/{index}"), schema)),
            ),
            _ if keyword == "$defs" || keyword == "definitions" => {
                found.extend(
                    value
                        .as_object()
                        .into_iter()
                        .flatten()
                        .map(|(name, schema)| (format!("{below}/{}", escaped(name)), schema)),
                );
            }
            _ => {}
        }
    }
    // A part that is just false fails by itself, but means no fault.
    found.retain(|(_, schema)| schema.is_object());
    found
}

fn parser_options(options: &SchemaOptions<'_>) -> Value {
    let whitespace = match (options.compact, options.whitespace) {
        (true, _) => Value::Null,
        (false, Some(pattern)) => Value::from(pattern),
        (false, None) => Value::from(WHITESPACE),
    };
    json!({
        "whitespace_flexible": false,
        "whitespace_pattern": whitespace,
        "json_allowed_escapes": ESCAPES,
    })
}

struct Writer<'a> {
    refs: Refs<'a>,
    options: &'a SchemaOptions<'a>,
}

/// What the value of a keyword is made of.
enum Inside {
    Plain,
    Schema,
    /// An object of schemas by name, or a list of schemas.
    Schemas,
}

fn inside(keyword: &str, value: &Value) -> Inside {
    match keyword {
        "items" if value.is_array() => Inside::Schemas,
        "items" | "additionalProperties" | "additionalItems" => Inside::Schema,
        "properties" | "patternProperties" | "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
            Inside::Schemas
        }
        _ => Inside::Plain,
    }
}

impl Writer<'_> {
    fn schema(&mut self, schema: &Value, path: &str, depth: usize) -> Result<Value, SchemaError> {
        let wrong = |message: String| SchemaError {
            place: path.to_owned(),
            message,
        };
        if depth > MAX_DEPTH {
            return Err(wrong(format!("nested more than {MAX_DEPTH} deep")));
        }
        let map = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(map) => map,
            _ => return Err(wrong("a schema must be an object, true or false".into())),
        };
        if is_never(map) {
            return Ok(Value::Bool(false));
        }
        let mut out = Map::new();
        for (keyword, value) in map {
            let place = Place { path, keyword };
            if !check_keyword(place, value)? {
                continue;
            }
            let below = format!("{path}/{}", escaped(keyword));
            let written = match inside(keyword, value) {
                _ if keyword == "$ref" => self.refs.rename(place, value)?,
                Inside::Plain => value.clone(),
                Inside::Schema => self.schema(value, &below, depth + 1)?,
                Inside::Schemas => self.schemas(value, &below, depth + 1)?,
            };
            out.insert(keyword.clone(), written);
        }
        if self.options.closed && is_open_object(map) {
            out.insert("additionalProperties".into(), Value::Bool(false));
        }
        schema_names::expand(&mut out, path, &self.refs)?;
        check_together(&mut out, path)?;
        Ok(Value::Object(out))
    }

    fn schemas(&mut self, value: &Value, path: &str, depth: usize) -> Result<Value, SchemaError> {
        match value {
            Value::Object(map) => {
                let mut out = Map::new();
                for (name, schema) in map {
                    let below = format!("{path}/{}", escaped(name));
                    out.insert(name.clone(), self.schema(schema, &below, depth)?);
                }
                Ok(Value::Object(out))
            }
            Value::Array(schemas) => (0..)
                .zip(schemas)
                .map(|(index, schema): (usize, _)| {
                    self.schema(schema, &format!("{path}/{index}"), depth)
                })
                .collect(),
            other => Ok(other.clone()),
        }
    }
}

fn is_open_object(map: &Map<String, Value>) -> bool {
    map.contains_key("properties") && !map.contains_key("additionalProperties")
}

/// A name within a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}
