//! Other spellings of what JSON Schema 2020-12 says: those of older drafts, and of generators that have no word for
//! "nothing".

use serde_json::{Map, Value};

/// Whether nothing satisfies the schema, in the words of generators without `false`: `{"not": {}}`.
pub fn is_never(map: &Map<String, Value>) -> bool {
    match map.get("not") {
        Some(Value::Bool(excluded)) => *excluded,
        Some(Value::Object(excluded)) => excluded.is_empty(),
        _ => false,
    }
}

/// Rewrites the keywords of older drafts that have checked values.
pub fn modernize(map: &mut Map<String, Value>) {
    modernize_items(map);
    modernize_bound(map, "minimum", "exclusiveMinimum");
    modernize_bound(map, "maximum", "exclusiveMaximum");
}

/// A list in `items` is the older form of `prefixItems`.
fn modernize_items(map: &mut Map<String, Value>) {
    let additional = map.shift_remove("additionalItems");
    if map.get("items").is_some_and(Value::is_array) {
        if let Some(items) = map.shift_remove("items") {
            map.insert("prefixItems".into(), items);
        }
        if let Some(additional) = additional {
            map.insert("items".into(), additional);
        }
    }
}

/// In draft 4 `exclusive…` says whether the bound itself is left out.
fn modernize_bound(map: &mut Map<String, Value>, bound: &str, exclusive: &str) {
    let Some(leaves_out) = map.get(exclusive).and_then(Value::as_bool) else {
        return;
    };
    map.shift_remove(exclusive);
    if leaves_out && let Some(value) = map.shift_remove(bound) {
        map.insert(exclusive.into(), value);
    }
}
