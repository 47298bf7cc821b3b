//! A regular expression for the whole output.

use llguidance::regex_to_lark;

/// A Lark grammar.
pub fn regex_grammar(pattern: &str) -> Result<String, String> {
    Ok(format!("start: {}\n", regex_body(pattern)?))
}

/// The pattern as a Lark terminal. Anchors at the two ends say what is so anyway, and the parser has none.
pub fn regex_body(pattern: &str) -> Result<String, String> {
    let body = without_anchors(pattern);
    if body.is_empty() {
        return Err("the pattern is empty".into());
    }
    Ok(format!("/{}/", regex_to_lark(body, "")))
}

fn without_anchors(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let body = pattern.strip_suffix('$').unwrap_or(pattern);
    let escapes = body.len() - body.trim_end_matches('\\').len();
    if escapes % 2 == 1 { pattern } else { body }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_anchors_at_the_ends_go() {
        for (pattern, body) in [
            ("^a$", "a"),
            ("a", "a"),
            (r"a\$", r"a\$"),
            (r"a\\$", r"a\\"),
            ("$", ""),
        ] {
            assert_eq!(without_anchors(pattern), body);
        }
    }
}
