//! What every token of a vocabulary stands for, as bytes: the decoder of a tokenizer.json applied ahead of time.
//!
//! A decoder of the `tokenizers` crate turns a list of tokens into text. All that language models use work token by
//! token but for four things, which are kept as data here: the first token may differ (Metaspace, `WordPiece`), bytes of
//! several tokens may form one character (byte-level, byte fallback), blanks at the very start may be cut (Strip), and
//! the last token's word end is not a blank (BPE suffix). Not here: the state of a sequence (`detokenizer`).

use thiserror::Error;
use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Decoder, Tokenizer};

use crate::ids::TokenId;

/// Ids above this are a damaged file, not a vocabulary.
const MAX_VOCAB_SIZE: usize = 1 << 24;

/// Why a decoder can't be applied token by token.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PiecesError {
    #[error("its decoder {0} is not supported")]
    Decoder(&'static str),
    #[error("its decoder failed on the token {token:?}: {message}")]
    Token { token: String, message: String },
    #[error("it has a token with id {0}; ids end at {MAX_VOCAB_SIZE}")]
    HugeId(u32),
}

/// How a token becomes text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// The id is not in the vocabulary.
    #[default]
    Unknown,
    Text,
    /// Text, and a blank unless it is the last token.
    WordEnd,
    /// One byte (byte fallback).
    Byte,
}

/// What must be known of a token besides its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traits {
    pub kind: Kind,
    pub is_special: bool,
}

/// Byte strings by token id.
#[derive(Debug, Default)]
struct Table {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Table {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len() as u32);
    }

    fn get(&self, id: usize) -> &[u8] {
        let Some(end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..*end as usize]
    }
}

/// The pieces of a vocabulary.
#[derive(Debug)]
pub struct Pieces {
    next: Table,
    /// Where the first token of a text differs from the others.
    first: Option<Table>,
    traits: Vec<Traits>,
    program: Program,
}

impl Pieces {
    /// Applies the tokenizer's decoder to every token.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, PiecesError> {
        let program = Program::new(tokenizer.get_decoder())?;
        let max_id = tokenizer.get_vocab(true).into_values().max();
        let vocab_size = max_id.map_or(0, |id| id as usize + 1);
        if vocab_size > MAX_VOCAB_SIZE {
            return Err(PiecesError::HugeId(vocab_size as u32 - 1));
        }
        let mut pieces = Self {
            next: Table::default(),
            first: program.first_differs().then(Table::default),
            traits: Vec::with_capacity(vocab_size),
            program,
        };
        for id in 0..vocab_size as TokenId {
            pieces.push(tokenizer, id)?;
        }
        Ok(pieces)
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: TokenId) -> Result<(), PiecesError> {
        let Some(token) = tokenizer.id_to_token(id) else {
            self.next.push(&[]);
            if let Some(first) = &mut self.first {
                first.push(&[]);
            }
            self.traits.push(Traits::default());
            return Ok(());
        };
        let (kind, bytes) = self.program.piece(&token, false)?;
        self.next.push(&bytes);
        if let Some(first) = &mut self.first {
            first.push(&self.program.piece(&token, true)?.1);
        }
        let added = tokenizer.get_added_vocabulary();
        // `token` may be a normalized form, by which the vocabulary does not know its special tokens.
        let is_added_special = added
            .get_added_tokens_decoder()
            .get(&id)
            .is_some_and(|token| token.special);
        self.traits.push(Traits {
            kind,
            is_special: is_added_special || added.is_special_token(&token),
        });
        Ok(())
    }

    /// The highest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.traits.len()
    }

    /// `Kind::Unknown` for an id outside the vocabulary.
    pub fn traits(&self, id: TokenId) -> Traits {
        self.traits.get(id as usize).copied().unwrap_or_default()
    }

    /// The bytes of a token in running text; none for an unknown one.
    pub fn bytes(&self, id: TokenId) -> &[u8] {
        self.next.get(id as usize)
    }

    /// The bytes of a token at the start of a text.
    pub fn first_bytes(&self, id: TokenId) -> &[u8] {
        self.first.as_ref().unwrap_or(&self.next).get(id as usize)
    }

    /// Bytes of neighbouring byte tokens are text only when all of them together are UTF-8.
    pub fn has_byte_fallback(&self) -> bool {
        self.program.fallback.is_some()
    }

    /// The text of a run of byte tokens, after the stages that follow byte fallback.
    pub fn run_text(&self, text: String, is_first: bool) -> String {
        let stages = self
            .program
            .fallback
            .map_or(&[][..], |at| &self.program.stages[at..]);
        stages.iter().fold(text, |text, stage| {
            // Every stage has worked on all tokens of the vocabulary; none can fail on text.
            apply(stage, text.clone(), is_first).unwrap_or(text)
        })
    }

    /// How many of which character are cut from the start of a text.
    pub fn leading_strip(&self) -> Option<(char, usize)> {
        self.program.strip
    }
}

/// A decoder, taken apart.
#[derive(Debug, Default)]
struct Program {
    /// Applied to each token.
    stages: Vec<DecoderWrapper>,
    /// Byte fallback comes before this stage.
    fallback: Option<usize>,
    /// Characters stand for bytes.
    is_byte_level: bool,
    /// Marks the end of a word.
    suffix: Option<String>,
    /// There is no decoder: tokens are joined by blanks.
    is_joined: bool,
    strip: Option<(char, usize)>,
    /// The text is one string from here on.
    is_fused: bool,
}

impl Program {
    fn new(decoder: Option<&DecoderWrapper>) -> Result<Self, PiecesError> {
        let mut program = Self::default();
        match decoder {
            None => program.is_joined = true,
            Some(decoder) => program.add(decoder)?,
        }
        Ok(program)
    }

    fn add(&mut self, decoder: &DecoderWrapper) -> Result<(), PiecesError> {
        match decoder {
            DecoderWrapper::Sequence(sequence) => {
                return sequence
                    .get_decoders()
                    .iter()
                    .try_for_each(|decoder| self.add(decoder));
            }
            DecoderWrapper::Fuse(_) => self.is_fused = true,
            DecoderWrapper::Strip(strip) if strip.stop > 0 => {
                return Err(PiecesError::Decoder("Strip at the end"));
            }
            DecoderWrapper::Strip(strip) if self.is_fused => {
                if self.strip.replace((strip.content, strip.start)).is_some() {
                    return Err(PiecesError::Decoder("Strip after Strip"));
                }
            }
            other if self.is_fused => return Err(PiecesError::Decoder(after_fuse(other))),
            DecoderWrapper::ByteLevel(_) => {
                self.is_byte_level = true;
                self.is_fused = true;
            }
            DecoderWrapper::ByteFallback(_) => self.fallback = Some(self.stages.len()),
            DecoderWrapper::BPE(bpe) => {
                self.suffix = Some(bpe.suffix.clone());
                self.is_fused = true;
            }
            DecoderWrapper::CTC(_) => return Err(PiecesError::Decoder("CTC")),
            DecoderWrapper::Strip(_)
            | DecoderWrapper::Replace(_)
            | DecoderWrapper::Metaspace(_)
            | DecoderWrapper::WordPiece(_) => self.stages.push(decoder.clone()),
        }
        Ok(())
    }

    fn first_differs(&self) -> bool {
        self.is_joined || self.stages.iter().any(looks_at_first)
    }

    /// One token's share of the text.
    fn piece(&self, token: &str, is_first: bool) -> Result<(Kind, Vec<u8>), PiecesError> {
        let (before, after) = self.stages.split_at(self.fallback.unwrap_or(0));
        let mut text = apply_all(before, token.to_owned(), is_first)?;
        if let Some(byte) = self.fallback.and_then(|_| byte_of_token(&text)) {
            return Ok((Kind::Byte, vec![byte]));
        }
        text = apply_all(after, text, is_first)?;
        let mut kind = Kind::Text;
        if let Some(suffix) = &self.suffix {
            if let Some(word) = text.strip_suffix(suffix.as_str()) {
                kind = Kind::WordEnd;
                text.truncate(word.len());
            }
            text = text.replace(suffix.as_str(), " ");
        }
        if self.is_joined && !is_first {
            text.insert(0, ' ');
        }
        let bytes = if self.is_byte_level {
            level_bytes(text)
        } else {
            text.into_bytes()
        };
        Ok((kind, bytes))
    }
}

fn after_fuse(decoder: &DecoderWrapper) -> &'static str {
    match decoder {
        DecoderWrapper::BPE(_) => "BPEDecoder after Fuse",
        DecoderWrapper::ByteLevel(_) => "ByteLevel after Fuse",
        DecoderWrapper::WordPiece(_) => "WordPiece after Fuse",
        DecoderWrapper::Metaspace(_) => "Metaspace after Fuse",
        DecoderWrapper::CTC(_) => "CTC after Fuse",
        DecoderWrapper::Replace(_) => "Replace after Fuse",
        DecoderWrapper::ByteFallback(_) => "ByteFallback after Fuse",
        DecoderWrapper::Sequence(_) | DecoderWrapper::Fuse(_) | DecoderWrapper::Strip(_) => {
            "Sequence"
        }
    }
}

fn looks_at_first(stage: &DecoderWrapper) -> bool {
    matches!(
        stage,
        DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_)
    )
}

fn apply_all(
    stages: &[DecoderWrapper],
    token: String,
    is_first: bool,
) -> Result<String, PiecesError> {
    stages.iter().try_fold(token, |text, stage| {
        apply(stage, text, is_first)
            .map_err(|(token, message)| PiecesError::Token { token, message })
    })
}

/// One stage on one token, which is the first of a text or not.
fn apply(
    stage: &DecoderWrapper,
    token: String,
    is_first: bool,
) -> Result<String, (String, String)> {
    let tokens = if is_first || !looks_at_first(stage) {
        vec![token.clone()]
    } else {
        vec![String::new(), token.clone()]
    };
    match stage.decode_chain(tokens) {
        Ok(mut texts) => Ok(texts.pop().unwrap_or_default()),
        Err(error) => Err((token, error.to_string())),
    }
}

/// The byte that a token such as `<0x0A>` stands for.
fn byte_of_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 {
        u8::from_str_radix(digits, 16).ok()
    } else {
        None
    }
}

/// The bytes behind a byte-level token: every character is a byte in disguise. Tokens with other characters (added
/// ones) stand for themselves.
fn level_bytes(token: String) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(level_byte).collect();
    bytes.unwrap_or_else(|| token.into_bytes())
}

/// GPT-2's disguise: printable Latin-1 characters stand for themselves, the 68 others for 256, 257, … in order.
fn level_byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    let hidden = |low: u8, offset: u32| Some(low + offset as u8);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => hidden(0x00, code - 0x100),
        0x121..=0x142 => hidden(0x7f, code - 0x121),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..0x200)
            .filter_map(char::from_u32)
            .filter_map(level_byte)
            .collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(level_byte('Ġ'), Some(b' '));
        assert_eq!(level_byte('Ċ'), Some(b'\n'));
        assert_eq!(level_bytes("a b".to_owned()), b"a b");
    }

    #[test]
    fn byte_tokens_are_told_from_text() {
        assert_eq!(byte_of_token("<0x0A>"), Some(10));
        assert_eq!(byte_of_token("<0xff>"), Some(255));
        for text in ["<0x0>", "<0x0AB>", "0x0A", "<0xZZ>", "<0xé>"] {
            assert_eq!(byte_of_token(text), None, "{text}");
        }
    }
}
