//! What each keyword of JSON Schema may hold, and which of them the parser enforces. Nothing that restricts is dropped:
//! a keyword is enforced, or it only describes, or the schema is refused.

use serde_json::{Map, Value, json};

use super::schema_error::{Place, SchemaError};
use super::schema_spellings::modernize;

type Check = fn(Place<'_>, &Value) -> Result<bool, SchemaError>;

/// Longest string or list, and most properties, that a schema may ask for.
const MAX_COUNT: u64 = 1_000_000;
const MAX_PATTERN_BYTES: usize = 16 << 10;
/// Every integer below is a double, and no other integer rounds to it.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

const TYPES: [&str; 7] = [
    "null", "boolean", "integer", "number", "string", "array", "object",
];

/// Keyword -> its check, which says whether the parser is to see it.
const CHECKS: &[(&str, Check)] = &[
    ("type", types),
    ("enum", members),
    ("const", constant),
    ("properties", schemas_by_name),
    ("patternProperties", schemas_by_name),
    ("additionalProperties", anything),
    ("required", names),
    ("minProperties", count),
    ("maxProperties", count),
    ("items", anything),
    ("prefixItems", schema_list),
    ("additionalItems", anything),
    ("minItems", count),
    ("maxItems", count),
    ("uniqueItems", boolean),
    ("minLength", count),
    ("maxLength", count),
    ("pattern", pattern),
    ("format", format),
    ("minimum", number),
    ("maximum", number),
    ("exclusiveMinimum", exclusive_bound),
    ("exclusiveMaximum", exclusive_bound),
    ("multipleOf", positive),
    ("anyOf", schema_list),
    ("oneOf", schema_list),
    ("allOf", schema_list),
    ("$ref", anything),
    ("unevaluatedProperties", anything),
    ("unevaluatedItems", anything),
    ("contains", refused),
    ("minContains", refused),
    ("maxContains", refused),
    ("propertyNames", anything),
    ("not", refused_unless_false),
    ("if", anything),
    ("then", anything),
    ("else", anything),
    ("dependentRequired", refused_unless_empty),
    ("dependentSchemas", refused_unless_empty),
    ("dependencies", refused_unless_empty),
    ("$dynamicRef", refused),
    ("$recursiveRef", refused),
];

/// Whether the parser is to see the keyword. Unknown ones describe, as JSON Schema says.
pub fn check_keyword(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    let entry = CHECKS.iter().find(|(keyword, _)| *keyword == place.keyword);
    entry.map_or(Ok(false), |(_, check)| check(place, value))
}

#[allow(clippy::unnecessary_wraps)]
fn anything(_: Place<'_>, _: &Value) -> Result<bool, SchemaError> {
    Ok(true)
}

fn refused(place: Place<'_>, _: &Value) -> Result<bool, SchemaError> {
    Err(place.error("is not supported"))
}

fn refused_unless_empty(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value {
        Value::Object(map) if map.is_empty() => Ok(false),
        _ => refused(place, value),
    }
}

/// What excludes all was found before.
fn refused_unless_false(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value {
        Value::Bool(false) => Ok(false),
        _ => refused(place, value),
    }
}

fn types(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    let ok = match value {
        Value::Array(types) => !types.is_empty() && types.iter().all(is_type),
        other => is_type(other),
    };
    if ok {
        return Ok(true);
    }
    Err(place.error(format!(
        "must be one or a list of {}, not {value}",
        TYPES.join(", ")
    )))
}

fn members(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value.as_array() {
        Some(members) if !members.is_empty() => {
            members
                .iter()
                .try_for_each(|member| writable(place, member))?;
            Ok(true)
        }
        _ => Err(place.error("must be a list of at least one value")),
    }
}

fn constant(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    writable(place, value).map(|()| true)
}

/// Whether the parser can write exactly this value.
fn writable(place: Place<'_>, value: &Value) -> Result<(), SchemaError> {
    match value {
        Value::Null | Value::Bool(_) => Ok(()),
        Value::Number(number) => match number.as_f64() {
            Some(value) if value.abs() < MAX_EXACT => Ok(()),
            _ => Err(place.error(format!("holds {number}, beyond ±2^53"))),
        },
        Value::String(text) => plain_text(place, text),
        Value::Array(values) => values.iter().try_for_each(|value| writable(place, value)),
        Value::Object(map) => map.iter().try_for_each(|(name, value)| {
            plain_text(place, name)?;
            writable(place, value)
        }),
    }
}

/// Control characters without a short escape can't be written.
fn plain_text(place: Place<'_>, text: &str) -> Result<(), SchemaError> {
    let is_odd = |c: &char| c.is_control() && c.is_ascii() && !"\n\r\t\u{8}\u{c}".contains(*c);
    match text.chars().find(is_odd) {
        Some(c) => Err(place.error(format!(
            "holds the control character U+{:04X}",
            u32::from(c)
        ))),
        None => Ok(()),
    }
}

fn schemas_by_name(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    let Value::Object(map) = value else {
        return Err(place.error("must be an object"));
    };
    map.keys().try_for_each(|name| plain_text(place, name))?;
    Ok(true)
}

fn schema_list(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value.as_array() {
        Some(schemas) if !schemas.is_empty() => Ok(true),
        _ => Err(place.error("must be a list of at least one schema")),
    }
}

fn names(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    let wrong = || place.error("must be a list of strings");
    for name in value.as_array().ok_or_else(wrong)? {
        plain_text(place, name.as_str().ok_or_else(wrong)?)?;
    }
    Ok(true)
}

fn boolean(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    value
        .as_bool()
        .ok_or_else(|| place.error("must be true or false"))
}

fn count(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value.as_f64() {
        Some(count) if count >= 0.0 && count.fract() == 0.0 => {
            if count > MAX_COUNT as f64 {
                return Err(place.error(format!("is {value}; at most {MAX_COUNT} is taken")));
            }
            Ok(true)
        }
        _ => Err(place.error(format!("must be a whole number from 0, not {value}"))),
    }
}

fn pattern(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value.as_str() {
        Some(pattern) if pattern.len() <= MAX_PATTERN_BYTES => Ok(true),
        Some(_) => Err(place.error(format!("is longer than {MAX_PATTERN_BYTES} bytes"))),
        None => Err(place.error("must be a string")),
    }
}

fn number(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    match value.as_f64() {
        Some(bound) if bound.abs() < MAX_EXACT => Ok(true),
        Some(_) => Err(place.error(format!("is {value}; bounds beyond ±2^53 are not supported"))),
        None => Err(place.error(format!("must be a number, not {value}"))),
    }
}

/// Draft 4 has a boolean here.
fn exclusive_bound(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    if value.is_boolean() {
        return Ok(true);
    }
    number(place, value)
}

fn positive(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    number(place, value)?;
    match value.as_f64() {
        Some(step) if step > 0.0 => Ok(true),
        _ => Err(place.error(format!("must be more than 0, not {value}"))),
    }
}

/// Formats that are enforced by the parser itself.
const FORMATS: [&str; 7] = [
    "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
];
/// Formats of JSON Schema that can't be enforced.
const HARD_FORMATS: [&str; 9] = [
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "uri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
];
const DATE: &str = concat!(
    "(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-",
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|",
    "02-(?:0[1-9]|1[0-9]|2[0-8]))|",
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
);
/// Without leap seconds, which exist at some midnights only.
const TIME: &str = concat!(
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?",
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
);

fn format(place: Place<'_>, value: &Value) -> Result<bool, SchemaError> {
    let name = value
        .as_str()
        .ok_or_else(|| place.error("must be a string"))?;
    if HARD_FORMATS.contains(&name) {
        return Err(place.error(format!("can't be {name:?}: that is not supported")));
    }
    // Others only describe, as JSON Schema says of names that are not its own.
    Ok(FORMATS.contains(&name) || exact_format(name).is_some())
}

/// Formats whose pattern here is stricter than the parser's own.
fn exact_format(name: &str) -> Option<String> {
    match name {
        "date" => Some(format!("^{DATE}$")),
        "time" => Some(format!("^{TIME}$")),
        "date-time" => Some(format!("^{DATE}T{TIME}$")),
        _ => None,
    }
}

/// What keywords mean together: `map` holds those that the parser is to see, and is changed to what it understands.
pub fn check_together(map: &mut Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    modernize(map);
    open_choice(map);
    expand_format(map);
    check_unique_items(map, path)?;
    check_unevaluated(map, path)?;
    check_condition(map, path)?;
    check_min_properties(map, path)
}

/// Of different constants, none or one can match: `oneOf` says the same as `anyOf`.
fn open_choice(map: &mut Map<String, Value>) {
    let Some(options) = map.get("oneOf").and_then(Value::as_array) else {
        return;
    };
    let constants: Vec<_> = options.iter().map(|option| option.get("const")).collect();
    let differ = |at: usize| {
        constants[at]
            .is_some_and(|value| is_plain(value) && !constants[..at].contains(&Some(value)))
    };
    let is_open = !map.contains_key("anyOf") && (0..constants.len()).all(differ);
    if is_open && let Some(options) = map.shift_remove("oneOf") {
        map.insert("anyOf".into(), options);
    }
}

/// Neither a number, which has several spellings, nor made of parts.
fn is_plain(value: &Value) -> bool {
    value.is_string() || value.is_boolean() || value.is_null() || value.is_i64()
}

fn expand_format(map: &mut Map<String, Value>) {
    let exact = map
        .get("format")
        .and_then(Value::as_str)
        .and_then(exact_format);
    let Some(pattern) = exact else {
        return;
    };
    map.shift_remove("format");
    let rule = json!({"pattern": pattern});
    if let Some(rules) = map.get_mut("allOf").and_then(Value::as_array_mut) {
        rules.push(rule);
    } else if map.contains_key("pattern") {
        map.insert("allOf".into(), json!([rule]));
    } else {
        map.insert("pattern".into(), Value::from(pattern));
    }
}

fn check_unique_items(map: &mut Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    let most = map.get("maxItems").and_then(Value::as_f64);
    if map.shift_remove("uniqueItems").is_some() && most.is_none_or(|most| most > 1.0) {
        return Err(unsupported(path, "uniqueItems"));
    }
    Ok(())
}

fn unsupported(path: &str, keyword: &str) -> SchemaError {
    Place { path, keyword }.error("is not supported")
}

/// Keywords that also evaluate properties or items.
const APPLICATORS: [&str; 5] = ["$ref", "allOf", "anyOf", "oneOf", "if"];

/// Without those applicators, `unevaluated…` says the same as the plain keyword.
fn check_unevaluated(map: &mut Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    for (keyword, plain) in [
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ] {
        match map.shift_remove(keyword) {
            None | Some(Value::Bool(true)) => {}
            Some(_) if map.contains_key(plain) => {}
            Some(Value::Bool(false)) if !APPLICATORS.iter().any(|name| map.contains_key(*name)) => {
                map.insert(plain.into(), Value::Bool(false));
            }
            Some(_) => return Err(unsupported(path, keyword)),
        }
    }
    Ok(())
}

/// `if` alone, and `then` or `else` without it, say nothing.
fn check_condition(map: &mut Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    let parts = ["if", "then", "else"].map(|keyword| map.shift_remove(keyword).is_some());
    match parts {
        [true, true, _] | [true, _, true] => Err(unsupported(path, "if")),
        _ => Ok(()),
    }
}

/// The parser counts what is written; the same further name written twice would be counted twice.
fn check_min_properties(map: &Map<String, Value>, path: &str) -> Result<(), SchemaError> {
    let least = map.get("minProperties").and_then(Value::as_f64);
    let required = map.get("required").and_then(Value::as_array);
    let num_required = required.map_or(0, Vec::len);
    let is_closed = map.get("additionalProperties") == Some(&Value::Bool(false))
        && !map.contains_key("patternProperties");
    if least.is_some_and(|least| least > num_required as f64 + 1.0) && !is_closed {
        return Err(Place {
            path,
            keyword: "minProperties",
        }
        .error(
            "can't be enforced where further names are free (at most one more than \"required\")",
        ));
    }
    Ok(())
}
