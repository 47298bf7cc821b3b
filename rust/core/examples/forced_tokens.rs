//! How many steps jump-ahead would save: a JSON text's tokens, and those of them that its schema leaves no choice about.
//!
//!     cargo run --release -p octavo-core --example forced_tokens -- TOKENIZER.json SCHEMA.json TEXT.json...
//!
//! A step samples one token; with jump-ahead the forced text behind it is drafted, tokenized as the tokenizer would (but
//! for the last token, which what follows may change), and taken as far as it is what the text has.

use std::error::Error;
use std::fs;
use std::sync::Arc;

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use octavo_core::ids::TokenId;
use octavo_core::tokenizer::Tokenizer;
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

const MAX_DRAFT: usize = 8;
/// What Octavo lets stand between the tokens of JSON, and `disable_any_whitespace`.
const OPTIONS: [(&str, &str); 2] = [
    (
        "whitespace",
        r#"{"whitespace_pattern": "( |\\n[ \\t]{0,16})?"}"#,
    ),
    ("no whitespace", r#"{"whitespace_flexible": false}"#),
];

fn main() -> Result<(), Box<dyn Error>> {
    let files: Vec<String> = std::env::args().skip(1).collect();
    let [tokenizer, schema, texts @ ..] = files.as_slice() else {
        return Err("give TOKENIZER.json SCHEMA.json TEXT.json...".into());
    };
    let tokenizer = Tokenizer::from_file(tokenizer.as_ref())?;
    let size = u32::try_from(tokenizer.vocab_size())?;
    let words: Vec<Vec<u8>> = (0..size)
        .map(|id| tokenizer.token_bytes(id).to_vec())
        .collect();
    let trie = TokTrie::from(&TokRxInfo::new(size, toktrie::INVALID_TOKEN), &words);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let factory = ParserFactory::new_simple(&env)?;
    let schema: Value = serde_json::from_str(&fs::read_to_string(schema)?)?;
    for path in texts {
        let ids = tokenizer.encode(&fs::read_to_string(path)?, false)?;
        for (name, options) in OPTIONS {
            let mut schema = schema.clone();
            schema["x-guidance"] = serde_json::from_str(options).unwrap_or(json!({}));
            let grammar = TopLevelGrammar::from_json_schema(schema);
            let mut matcher = Matcher::new(factory.create_parser(grammar));
            match num_steps(&mut matcher, &tokenizer, &ids) {
                Ok(steps) => println!("{path}, {name}: {} tokens, {steps} steps", ids.len()),
                Err(error) => println!("{path}, {name}: {error}"),
            }
        }
    }
    Ok(())
}

/// Steps with jump-ahead until all of the text's tokens are there.
fn num_steps(
    matcher: &mut Matcher,
    tokenizer: &Tokenizer,
    ids: &[TokenId],
) -> Result<usize, Box<dyn Error>> {
    let (mut at, mut steps) = (0, 0);
    while at < ids.len() {
        let forced = matcher.compute_ff_bytes();
        let mut draft = tokenizer.encode(&String::from_utf8_lossy(&forced), false)?;
        draft.pop();
        draft.truncate(MAX_DRAFT);
        let pairs = draft.iter().zip(&ids[at..]);
        let num_right = pairs.take_while(|(drafted, id)| drafted == id).count();
        let end = ids.len().min(at + num_right + 1);
        matcher
            .consume_tokens(&ids[at..end])
            .map_err(|_| "the schema and its whitespace do not allow this text")?;
        (at, steps) = (end, steps + 1);
    }
    Ok(steps)
}
