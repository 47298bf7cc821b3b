//! The vocabulary as grammars see it: the bytes of every token in a trie, and which tokens end a sequence.
//!
//! Special tokens never match text: their bytes start with the marker 0xFF, which UTF-8 does not have, and a grammar
//! names them by themselves. Tokens of which nothing is known are never allowed.

use std::path::Path;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use super::GrammarError;
use crate::ids::TokenId;
use crate::pieces::Kind;
use crate::tokenizer::Tokenizer;

const MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What one grammar may cost; beyond it, it is refused, or its sequence ends with an error.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    max_lexer_states: 50_000,
    max_grammar_size: 500_000,
    precompute_large_lexemes: true,
    verbose_errors: false,
};

/// Sets of tokens that a grammar takes whole where it allows all such texts: blanks, and what stands in JSON strings, of
/// the lengths that bounded strings have left. With only 10 and 30 a mask took up to 200 us near the end of a string.
fn slices() -> Vec<String> {
    let text = r#"[^"\\\x00-\x1F\x7F]"#;
    let mut slices = vec![r"[\x20\x0A\x0D\x09]+".to_owned()];
    slices.extend([1, 2, 3, 4, 5, 6, 8, 10, 16, 30].map(|most| format!("{text}{{1,{most}}}")));
    slices.push(format!("{text}+"));
    slices
}

/// Shared by all grammars of an engine.
pub struct Vocabulary {
    factory: ParserFactory,
    /// Text of the special tokens, longest first.
    specials: Vec<(String, TokenId)>,
    eos: Vec<TokenId>,
}

impl Vocabulary {
    /// Reads a tokenizer.json. `vocab_size` is the model's: ids beyond it do not exist, ids that the tokenizer does not
    /// know are never allowed.
    pub fn read(path: &Path, vocab_size: u32, eos: &[TokenId]) -> Result<Self, GrammarError> {
        let tokenizer =
            Tokenizer::from_file(path).map_err(|error| GrammarError(error.to_string()))?;
        Self::new(&tokenizer, vocab_size, eos)
    }

    pub fn new(
        tokenizer: &Tokenizer,
        vocab_size: u32,
        eos: &[TokenId],
    ) -> Result<Self, GrammarError> {
        let eos: Vec<TokenId> = eos.iter().copied().filter(|id| *id < vocab_size).collect();
        let mut specials = Vec::new();
        let mut words = Vec::with_capacity(vocab_size as usize);
        for id in 0..vocab_size {
            let traits = tokenizer.pieces().traits(id);
            let bytes = tokenizer.token_bytes(id);
            words.push(match traits.kind {
                Kind::WordEnd => {
                    return Err(GrammarError(
                        "structured_outputs: this tokenizer marks the ends of words, which grammars can't follow"
                            .into(),
                    ));
                }
                Kind::Unknown => Vec::new(),
                Kind::Text | Kind::Byte if traits.is_special || eos.contains(&id) => {
                    let text = tokenizer.id_to_token(id).unwrap_or_default();
                    let word = [&[MARKER], text.as_bytes()].concat();
                    specials.push((text, id));
                    word
                }
                Kind::Text | Kind::Byte if bytes.first() == Some(&MARKER) => Vec::new(),
                Kind::Text | Kind::Byte => bytes.to_vec(),
            });
        }
        specials.retain(|(text, _)| !text.is_empty());
        specials.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size, toktrie::INVALID_TOKEN), &words);
        let trie = if eos.is_empty() {
            trie
        } else {
            trie.with_eos_tokens(&eos)
        };
        // Not canonical: the model chooses among all spellings of forced text.
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(Self {
            factory,
            specials,
            eos,
        })
    }

    pub fn factory(&self) -> &ParserFactory {
        &self.factory
    }

    /// Ids that end a text.
    pub fn eos(&self) -> &[TokenId] {
        &self.eos
    }

    pub fn trie(&self) -> &TokTrie {
        self.factory.tok_env().tok_trie()
    }

    /// The bytes that a token adds to a text in which special tokens are shown.
    pub fn shown_bytes(&self, id: TokenId) -> &[u8] {
        let bytes = if (id as usize) < self.trie().vocab_size() {
            self.trie().token(id)
        } else {
            &[]
        };
        bytes.strip_prefix(&[MARKER]).unwrap_or(bytes)
    }

    /// Cuts text at the special tokens that it names.
    pub fn split_specials<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((at, len, id)) = self.first_special(rest) {
            if at > 0 {
                pieces.push(Piece::Text(&rest[..at]));
            }
            pieces.push(Piece::Special(id));
            rest = &rest[at + len..];
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest));
        }
        pieces
    }

    /// (offset, length, id) of the special token that comes first, the longest if several start there.
    fn first_special(&self, text: &str) -> Option<(usize, usize, TokenId)> {
        let found = self.specials.iter().filter_map(|(special, id)| {
            text.find(special.as_str())
                .map(|at| (at, special.len(), *id))
        });
        found.min_by_key(|(at, len, _)| (*at, std::cmp::Reverse(*len)))
    }
}

/// A part of a text that may name special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    Text(&'a str),
    Special(TokenId),
}
