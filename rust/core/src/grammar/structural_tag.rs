//! Structural tags: text with tagged parts, each with content of its own kind.
//!
//! Two forms are understood: `{structures: [{begin, schema, end}], triggers}`, and `{type: "structural_tag", format}`.
//! Tags, triggers and texts may name special tokens, which then stand for those tokens.

use std::fmt::Write;

use llguidance::regex_to_lark;
use serde::Deserialize;
use serde_json::Value;

use super::ebnf_lark::{ebnf_to_lark, is_ebnf};
use super::json_schema::{SchemaOptions, prepare};
use super::lark::{check_nesting, json_value, prepare_lark, quoted};
use super::regex::regex_body;
use super::vocabulary::{Piece, Vocabulary};

const MAX_DEPTH: usize = 16;
/// Any text.
const ANY: &str = "/(?s:.*)/";

#[derive(Deserialize)]
struct Structure {
    begin: String,
    #[serde(default)]
    schema: Option<Value>,
    end: String,
}

/// The older form.
#[derive(Deserialize)]
struct Structures {
    structures: Vec<Structure>,
    triggers: Vec<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Ends {
    One(String),
    Several(Vec<String>),
}

impl Ends {
    fn list(&self) -> &[String] {
        match self {
            Self::One(end) => std::slice::from_ref(end),
            Self::Several(ends) => ends,
        }
    }
}

/// One tag of a list.
#[derive(Deserialize)]
struct Tag {
    begin: String,
    content: Format,
    end: Ends,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Format {
    ConstString {
        value: String,
    },
    JsonSchema {
        json_schema: Value,
    },
    Regex {
        pattern: String,
    },
    Grammar {
        grammar: String,
    },
    AnyText,
    Sequence {
        elements: Vec<Format>,
    },
    Or {
        elements: Vec<Format>,
    },
    Tag(Box<Tag>),
    TriggeredTags {
        triggers: Vec<String>,
        tags: Vec<Tag>,
        #[serde(default)]
        at_least_one: bool,
        #[serde(default)]
        stop_after_first: bool,
    },
    TagsWithSeparator {
        tags: Vec<Tag>,
        separator: String,
        #[serde(default)]
        at_least_one: bool,
        #[serde(default)]
        stop_after_first: bool,
    },
}

/// A Lark grammar.
pub fn structural_tag_grammar(
    tag: &Value,
    vocabulary: &Vocabulary,
    options: &SchemaOptions<'_>,
) -> Result<String, String> {
    let parsed;
    let tag = match tag {
        Value::String(text) => {
            parsed = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
            &parsed
        }
        other => other,
    };
    let mut writer = Writer {
        vocabulary,
        options,
        out: String::new(),
        num_names: 0,
    };
    let start = match (tag.get("format"), tag.get("structures")) {
        (Some(format), None) => {
            let format = Format::deserialize(format).map_err(|error| format!("format: {error}"))?;
            writer.format(&format, 0)?
        }
        (None, Some(_)) => writer.old_form(tag)?,
        _ => return Err("needs either format, or structures and triggers".into()),
    };
    let _ = writeln!(writer.out, "start: {start}");
    Ok(writer.out)
}

/// A pattern that matches just this text.
fn regex_escaped(text: &str) -> String {
    let mut pattern = String::new();
    for c in text.chars() {
        if r"\.+*?()|[]{}^$#&-~".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

struct Writer<'a> {
    vocabulary: &'a Vocabulary,
    options: &'a SchemaOptions<'a>,
    out: String,
    num_names: usize,
}

impl Writer<'_> {
    fn old_form(&mut self, tag: &Value) -> Result<String, String> {
        let form = Structures::deserialize(tag).map_err(|error| error.to_string())?;
        let tags: Vec<Tag> = form
            .structures
            .into_iter()
            .map(|structure| Tag {
                begin: structure.begin,
                content: Format::JsonSchema {
                    json_schema: structure.schema.unwrap_or(Value::Bool(true)),
                },
                end: Ends::One(structure.end),
            })
            .collect();
        self.triggered(&form.triggers, &tags, false, false, 0)
    }

    /// A rule's (lower case) or terminal's (upper case) name that is not used yet.
    fn name(&mut self, prefix: &str) -> String {
        self.num_names += 1;
        format!("{prefix}{}", self.num_names)
    }

    /// A rule with this body; its name.
    fn rule(&mut self, body: &str) -> String {
        let name = self.name("r");
        let _ = writeln!(self.out, "{name}: {body}");
        name
    }

    /// Text, and the special tokens that it names.
    fn text(&self, text: &str) -> String {
        let pieces = self.vocabulary.split_specials(text);
        let written: Vec<String> = pieces
            .into_iter()
            .map(|piece| match piece {
                Piece::Text(text) => quoted(text),
                Piece::Special(id) => format!("<[{id}]>"),
            })
            .collect();
        if written.is_empty() {
            return "\"\"".into();
        }
        written.join(" ")
    }

    /// Any text up to and with the first occurrence of `stop`.
    fn text_until(&mut self, stop: &str) -> String {
        let pieces = self.vocabulary.split_specials(stop);
        match pieces.split_first() {
            None => self.rule(ANY),
            // The text ends where the special token comes: no text has its bytes.
            Some((Piece::Special(_), _)) => {
                let body = format!("{ANY} {}", self.text(stop));
                self.rule(&body)
            }
            Some((Piece::Text(first), rest)) => {
                let name = self.name("r");
                let pattern = regex_to_lark(&regex_escaped(first), "");
                let _ = writeln!(self.out, "{name}[lazy]: /(?s:.*){pattern}/");
                if rest.is_empty() {
                    return name;
                }
                let tail = self.text(&stop[first.len()..]);
                self.rule(&format!("{name} {tail}"))
            }
        }
    }

    fn format(&mut self, format: &Format, depth: usize) -> Result<String, String> {
        if depth > MAX_DEPTH {
            return Err(format!("formats are nested more than {MAX_DEPTH} deep"));
        }
        match format {
            Format::ConstString { value } => Ok(self.text(value)),
            Format::AnyText => Ok(self.rule(ANY)),
            Format::JsonSchema { json_schema } => {
                let schema = prepare(json_schema, self.options).map_err(|e| e.to_string())?;
                Ok(self.rule(&json_value(&schema)))
            }
            Format::Regex { pattern } => {
                check_nesting("structural_tag", pattern).map_err(|error| error.to_string())?;
                let body = regex_body(pattern)?;
                Ok(self.rule(&body))
            }
            Format::Grammar { grammar } => {
                check_nesting("structural_tag", grammar).map_err(|error| error.to_string())?;
                let lark = if is_ebnf(grammar) {
                    ebnf_to_lark(grammar, "root")?
                } else {
                    prepare_lark(grammar, self.options)?
                };
                Ok(self.rule(&format!("%lark {{\n{lark}\n}}")))
            }
            Format::Sequence { elements } => {
                let parts = self.formats(elements, depth)?;
                Ok(self.rule(&parts.join(" ")))
            }
            Format::Or { elements } => {
                let parts = self.formats(elements, depth)?;
                Ok(self.rule(&parts.join(" | ")))
            }
            Format::Tag(tag) => self.tag(tag, &tag.begin, depth),
            Format::TriggeredTags {
                triggers,
                tags,
                at_least_one,
                stop_after_first,
            } => self.triggered(triggers, tags, *at_least_one, *stop_after_first, depth),
            Format::TagsWithSeparator {
                tags,
                separator,
                at_least_one,
                stop_after_first,
            } => self.separated(tags, separator, *at_least_one, *stop_after_first, depth),
        }
    }

    fn formats(&mut self, formats: &[Format], depth: usize) -> Result<Vec<String>, String> {
        if formats.is_empty() {
            return Err("elements must not be empty".into());
        }
        formats
            .iter()
            .map(|format| self.format(format, depth + 1))
            .collect()
    }

    /// A tag from `begin` (which may be what a trigger leaves of it) to its end.
    fn tag(&mut self, tag: &Tag, begin: &str, depth: usize) -> Result<String, String> {
        let begin = self.text(begin);
        let ends = tag.end.list();
        if ends.is_empty() {
            return Err(format!("the tag {:?} has no end", tag.begin));
        }
        // Free text ends at its tag's end, so the two are one.
        if matches!(tag.content, Format::AnyText) && ends.iter().all(|end| !end.is_empty()) {
            let bodies: Vec<String> = ends.iter().map(|end| self.text_until(end)).collect();
            return Ok(self.rule(&format!("{begin} ({})", bodies.join(" | "))));
        }
        let content = self.format(&tag.content, depth + 1)?;
        let ends: Vec<String> = ends.iter().map(|end| self.text(end)).collect();
        Ok(self.rule(&format!("{begin} {content} ({})", ends.join(" | "))))
    }

    /// Free text; wherever a trigger comes up, one of the tags that begin with it follows.
    fn triggered(
        &mut self,
        triggers: &[String],
        tags: &[Tag],
        at_least_one: bool,
        stop_after_first: bool,
        depth: usize,
    ) -> Result<String, String> {
        if triggers.is_empty() || triggers.iter().any(String::is_empty) {
            return Err("triggers must be texts, at least one".into());
        }
        let mut used = vec![false; tags.len()];
        let mut options = Vec::new();
        for trigger in triggers {
            let mut follow = Vec::new();
            for (tag, used) in tags.iter().zip(&mut used) {
                if let Some(rest) = tag.begin.strip_prefix(trigger.as_str()) {
                    *used = true;
                    follow.push(self.tag(tag, rest, depth)?);
                }
            }
            if follow.is_empty() {
                return Err(format!("no tag begins with the trigger {trigger:?}"));
            }
            let before = self.text_until(trigger);
            options.push(format!("{before} ({})", follow.join(" | ")));
        }
        if let Some((tag, _)) = tags.iter().zip(&used).find(|(_, used)| !**used) {
            return Err(format!("the tag {:?} begins with no trigger", tag.begin));
        }
        let one = self.rule(&options.join(" | "));
        let tail = self.rule(ANY);
        Ok(match (at_least_one, stop_after_first) {
            (true, true) => one,
            (false, true) => self.rule(&format!("{one} | {tail}")),
            (true, false) => self.rule(&format!("{one}+ {tail}")),
            (false, false) => self.rule(&format!("{one}* {tail}")),
        })
    }

    fn separated(
        &mut self,
        tags: &[Tag],
        separator: &str,
        at_least_one: bool,
        stop_after_first: bool,
        depth: usize,
    ) -> Result<String, String> {
        if tags.is_empty() {
            return Err("tags must not be empty".into());
        }
        let mut options = Vec::new();
        for tag in tags {
            options.push(self.tag(tag, &tag.begin, depth)?);
        }
        let one = self.rule(&options.join(" | "));
        let separator = self.text(separator);
        let all = if stop_after_first {
            one
        } else {
            self.rule(&format!("{one} ({separator} {one})*"))
        };
        Ok(if at_least_one {
            all
        } else {
            self.rule(&format!("({all})?"))
        })
    }
}
