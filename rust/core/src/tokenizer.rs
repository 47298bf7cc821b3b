//! A tokenizer.json: text to ids by the `tokenizers` crate, ids to text by `Detokenizer`.
//!
//! Not here: where the file comes from, chat templates.

use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

use crate::detokenizer::Detokenizer;
use crate::ids::TokenId;
use crate::pieces::{Pieces, PiecesError};

/// Why there is no tokenizer, or no ids.
#[derive(Debug, Error)]
pub enum TokenizerError {
    #[error("can't read {path}: {source}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    #[error("not a tokenizer.json: {0}")]
    Parse(String),
    #[error("can't use this tokenizer.json: {0}")]
    Pieces(#[from] PiecesError),
    #[error("can't tokenize: {0}")]
    Encode(String),
}

/// Immutable, so that any number of threads share it.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Arc<Pieces>,
}

impl Tokenizer {
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let body = std::fs::read(path).map_err(|source| TokenizerError::Read {
            path: path.display().to_string(),
            source,
        })?;
        Self::from_json(&body)
    }

    pub fn from_json(body: &[u8]) -> Result<Self, TokenizerError> {
        let mut inner = tokenizers::Tokenizer::from_bytes(body)
            .map_err(|error| TokenizerError::Parse(error.to_string()))?;
        // Some files carry the truncation and padding of a training run.
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|error| TokenizerError::Parse(error.to_string()))?;
        let pieces = Arc::new(Pieces::new(&inner)?);
        Ok(Self { inner, pieces })
    }

    /// The ids of `text`, which may name special tokens.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, TokenizerError> {
        match self.inner.encode_fast(text, add_special_tokens) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(TokenizerError::Encode(error.to_string())),
        }
    }

    /// Like `encode`, on all cores.
    pub fn encode_batch(
        &self,
        texts: Vec<String>,
        add_special_tokens: bool,
    ) -> Result<Vec<Vec<TokenId>>, TokenizerError> {
        match self.inner.encode_batch_fast(texts, add_special_tokens) {
            Ok(encodings) => Ok(encodings
                .iter()
                .map(|encoding| encoding.get_ids().to_vec())
                .collect()),
            Err(error) => Err(TokenizerError::Encode(error.to_string())),
        }
    }

    /// The text of a whole sequence. Unknown ids stand for nothing.
    pub fn decode(&self, ids: &[TokenId], skip_special_tokens: bool) -> String {
        let mut detokenizer = Detokenizer::new(&self.pieces, skip_special_tokens);
        let mut text = String::new();
        for id in ids {
            detokenizer.push(&self.pieces, *id, &mut text);
        }
        detokenizer.finish(&self.pieces, &mut text);
        text
    }

    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.token_to_id(token)
    }

    pub fn id_to_token(&self, id: TokenId) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The bytes that a token stands for in running text; none for an unknown id.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// In ascending order.
    pub fn special_token_ids(&self) -> Vec<TokenId> {
        (0..self.vocab_size() as TokenId)
            .filter(|id| self.pieces.traits(*id).is_special)
            .collect()
    }

    /// The highest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.pieces.vocab_size()
    }

    pub fn pieces(&self) -> &Arc<Pieces> {
        &self.pieces
    }
}
