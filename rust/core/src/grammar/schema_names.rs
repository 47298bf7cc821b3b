//! `propertyNames` in keywords that the parser knows. Generators of schemas write it for maps: zod's records have
//! `{"type": "string"}`, which says nothing, and pydantic's `dict[Literal[…], …]` a list of names, also by reference.

use serde_json::{Map, Value};

use super::schema_error::{Place, SchemaError};
use super::schema_refs::Refs;
use super::schema_rules::check_keyword;

/// References that lead to a rule for names.
const MAX_HOPS: usize = 8;

enum Names {
    Any,
    Listed(Vec<String>),
    Like(String),
}

/// Replaces `propertyNames` in a schema whose other keywords have been written. Refused is what is neither a list of
/// names nor a pattern, and either of them beside patterns of properties.
pub fn expand(
    map: &mut Map<String, Value>,
    path: &str,
    refs: &Refs<'_>,
) -> Result<(), SchemaError> {
    let place = Place {
        path,
        keyword: "propertyNames",
    };
    let Some(rule) = map.shift_remove(place.keyword) else {
        return Ok(());
    };
    let has_patterns = map.contains_key("patternProperties");
    match read(place, &rule, refs, MAX_HOPS)? {
        Some(Names::Any) => {}
        Some(Names::Listed(names)) if !has_patterns => list(map, &names),
        Some(Names::Like(pattern)) if !has_patterns && !map.contains_key("properties") => {
            let further = close(map);
            map.insert(
                "patternProperties".into(),
                Map::from_iter([(pattern, further)]).into(),
            );
        }
        _ => return Err(place.error("is supported for lists of names and single patterns only")),
    }
    Ok(())
}

/// What a rule for names asks; None: something else.
fn read(
    place: Place<'_>,
    rule: &Value,
    refs: &Refs<'_>,
    hops: usize,
) -> Result<Option<Names>, SchemaError> {
    let rule = match rule {
        Value::Bool(true) => return Ok(Some(Names::Any)),
        Value::Object(rule) => rule,
        _ => return Ok(None),
    };
    let mut asked = Vec::new();
    for (keyword, value) in rule {
        let is_rule = check_keyword(
            Place {
                path: place.path,
                keyword,
            },
            value,
        )?;
        if is_rule && !(keyword == "type" && takes_strings(value)) {
            asked.push((keyword.as_str(), value));
        }
    }
    Ok(match asked[..] {
        [] => Some(Names::Any),
        [("enum", Value::Array(names))] => Some(Names::Listed(strings(names))),
        [("const", name)] => Some(Names::Listed(strings(std::slice::from_ref(name)))),
        [("pattern", Value::String(pattern))] => Some(Names::Like(pattern.clone())),
        [("$ref", Value::String(reference))] if hops > 0 => match refs.find(reference) {
            Some(target) => read(place, target, refs, hops - 1)?,
            None => None,
        },
        _ => None,
    })
}

fn takes_strings(types: &Value) -> bool {
    types == "string"
        || types
            .as_array()
            .is_some_and(|types| types.iter().any(|one| one == "string"))
}

/// Other values are never the name of a property.
fn strings(values: &[Value]) -> Vec<String> {
    values
        .iter()
        .filter_map(|value| value.as_str().map(str::to_owned))
        .collect()
}

/// Only these names: those that the schema did not know are as further properties were.
fn list(map: &mut Map<String, Value>, names: &[String]) {
    let further = close(map);
    let mut properties = match map.shift_remove("properties") {
        Some(Value::Object(properties)) => properties,
        _ => Map::new(),
    };
    properties.retain(|name, _| names.contains(name));
    if further != Value::Bool(false) {
        for name in names {
            if !properties.contains_key(name) {
                properties.insert(name.clone(), further.clone());
            }
        }
    }
    map.insert("properties".into(), properties.into());
}

/// No further properties; the schema that they had.
fn close(map: &mut Map<String, Value>) -> Value {
    map.insert("additionalProperties".into(), Value::Bool(false))
        .unwrap_or(Value::Bool(true))
}
