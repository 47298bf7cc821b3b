//! Ids of one sequence become text as they come, a bounded amount of work per id.
//!
//! The text never holds half a character: bytes wait until the character is complete. All texts joined are what
//! decoding all ids at once gives. Not here: what a token stands for (`pieces`), stop strings (`stop`).

use std::str;

use crate::ids::TokenId;
use crate::pieces::{Kind, Pieces};

const REPLACEMENT: &str = "\u{fffd}";

/// How many of a prompt's last tokens are looked at: enough for every half character.
const CONTEXT_TOKENS: usize = 8;

/// A run of byte tokens is text only when all of it is UTF-8, so it waits for its end; a run of whole characters that
/// has become this long does not wait any more.
const MAX_RUN_BYTES: usize = 32;

/// The byte tokens that follow each other at the end of the text so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// They are UTF-8, or may become it.
    Hopeful,
    Broken,
}

/// The state of one sequence between two of its tokens.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    skip_special_tokens: bool,
    /// Some token was not skipped: the next one is not the first.
    has_started: bool,
    /// The last token ended a word: a blank precedes the next one.
    owes_blank: bool,
    run: Run,
    /// Characters that may still be cut from the start.
    num_to_strip: usize,
    /// Bytes that are not text yet.
    held: Vec<u8>,
}

impl Detokenizer {
    /// A sequence without a prompt: its first token starts the text.
    pub fn new(pieces: &Pieces, skip_special_tokens: bool) -> Self {
        Self {
            skip_special_tokens,
            has_started: false,
            owes_blank: false,
            run: Run::Hopeful,
            num_to_strip: pieces.leading_strip().map_or(0, |(_, count)| count),
            held: Vec::new(),
        }
    }

    /// A sequence that goes on where `prompt` ends. A half character at the prompt's end belongs to the new text.
    pub fn after(pieces: &Pieces, prompt: &[TokenId], skip_special_tokens: bool) -> Self {
        let mut detokenizer = Self::new(pieces, skip_special_tokens);
        let mut visible = prompt
            .iter()
            .rev()
            .copied()
            .filter(|id| detokenizer.is_visible(pieces, *id));
        let mut context = Vec::new();
        let mut has_more = false;
        for id in visible.by_ref() {
            if context.len() >= CONTEXT_TOKENS && pieces.traits(id).kind != Kind::Byte {
                has_more = true;
                break;
            }
            context.push(id);
        }
        if has_more {
            detokenizer.has_started = true;
            detokenizer.num_to_strip = 0;
        }
        let mut shown = String::new();
        for id in context.into_iter().rev() {
            detokenizer.push(pieces, id, &mut shown);
        }
        let num_shown = match str::from_utf8(&detokenizer.held) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        detokenizer.held.drain(..num_shown);
        detokenizer
    }

    fn is_visible(&self, pieces: &Pieces, id: TokenId) -> bool {
        let traits = pieces.traits(id);
        traits.kind != Kind::Unknown && !(traits.is_special && self.skip_special_tokens)
    }

    /// Appends to `out` what is certain after one more token. Unknown ids stand for nothing.
    pub fn push(&mut self, pieces: &Pieces, id: TokenId, out: &mut String) {
        if !self.is_visible(pieces, id) {
            return;
        }
        let kind = pieces.traits(id).kind;
        if kind == Kind::Byte {
            for byte in pieces.bytes(id) {
                self.push_run_byte(pieces, *byte, out);
            }
            return;
        }
        if pieces.has_byte_fallback() {
            self.end_run(pieces, out);
        }
        if self.owes_blank {
            self.emit(pieces, " ", out);
        }
        self.owes_blank = kind == Kind::WordEnd;
        if self.has_started {
            self.push_bytes(pieces, pieces.bytes(id), out);
        } else {
            self.has_started = true;
            self.push_bytes(pieces, pieces.first_bytes(id), out);
        }
    }

    /// Appends what was held back: the sequence has ended. Incomplete characters become U+FFFD.
    pub fn finish(&mut self, pieces: &Pieces, out: &mut String) {
        if pieces.has_byte_fallback() {
            self.end_run(pieces, out);
        } else if !self.held.is_empty() {
            self.held.clear();
            self.emit(pieces, REPLACEMENT, out);
        }
    }

    /// Bytes of a token that follow those held back.
    fn push_bytes(&mut self, pieces: &Pieces, bytes: &[u8], out: &mut String) {
        if self.held.is_empty()
            && let Ok(text) = str::from_utf8(bytes)
        {
            self.emit(pieces, text, out);
            return;
        }
        let mut all = std::mem::take(&mut self.held);
        all.extend_from_slice(bytes);
        let mut chunks = all.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            self.emit(pieces, chunk.valid(), out);
            if chunk.invalid().is_empty() {
                continue;
            }
            if chunks.peek().is_none() && is_incomplete(chunk.invalid()) {
                self.held = chunk.invalid().to_vec();
            } else {
                self.emit(pieces, REPLACEMENT, out);
            }
        }
    }

    fn push_run_byte(&mut self, pieces: &Pieces, byte: u8, out: &mut String) {
        self.held.push(byte);
        if self.run == Run::Broken {
            self.emit_broken_run(pieces, out);
            return;
        }
        match str::from_utf8(&self.held) {
            Ok(_) if self.held.len() >= MAX_RUN_BYTES => self.end_run(pieces, out),
            Err(error) if error.error_len().is_some() => {
                self.run = Run::Broken;
                self.emit_broken_run(pieces, out);
            }
            Ok(_) | Err(_) => {}
        }
    }

    /// Another token ends the run of byte tokens, if there is one.
    fn end_run(&mut self, pieces: &Pieces, out: &mut String) {
        self.run = Run::Hopeful;
        if self.held.is_empty() {
            return;
        }
        match String::from_utf8(std::mem::take(&mut self.held)) {
            Ok(text) => {
                let text = pieces.run_text(text, !self.has_started);
                self.has_started = true;
                self.emit(pieces, &text, out);
            }
            Err(error) => {
                self.held = error.into_bytes();
                self.emit_broken_run(pieces, out);
            }
        }
    }

    /// Every byte of a run that is not UTF-8 becomes U+FFFD.
    fn emit_broken_run(&mut self, pieces: &Pieces, out: &mut String) {
        self.has_started = true;
        for _ in 0..self.held.len() {
            self.emit(pieces, REPLACEMENT, out);
        }
        self.held.clear();
    }

    fn emit(&mut self, pieces: &Pieces, mut text: &str, out: &mut String) {
        if self.num_to_strip > 0 {
            if let Some((character, _)) = pieces.leading_strip() {
                while let Some(rest) = text
                    .strip_prefix(character)
                    .filter(|_| self.num_to_strip > 0)
                {
                    text = rest;
                    self.num_to_strip -= 1;
                }
            }
            if !text.is_empty() {
                self.num_to_strip = 0;
            }
        }
        out.push_str(text);
    }
}

/// The bytes may become a character with more bytes.
fn is_incomplete(bytes: &[u8]) -> bool {
    matches!(str::from_utf8(bytes), Err(error) if error.valid_up_to() == 0 && error.error_len().is_none())
}
