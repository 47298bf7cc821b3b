//! `Tokenizer`: without the GIL wherever text is long.

use std::io;
use std::path::PathBuf;

use octavo_core::ids::TokenId;
use octavo_core::tokenizer::{Tokenizer as CoreTokenizer, TokenizerError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

#[pyclass(module = "octavo._core", frozen)]
pub struct Tokenizer {
    pub core: CoreTokenizer,
}

#[pymethods]
impl Tokenizer {
    #[staticmethod]
    fn from_file(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Self::wrap(py.detach(|| CoreTokenizer::from_file(&path)))
    }

    #[staticmethod]
    fn from_json(py: Python<'_>, body: &[u8]) -> PyResult<Self> {
        Self::wrap(py.detach(|| CoreTokenizer::from_json(body)))
    }

    #[getter]
    fn vocab_size(&self) -> usize {
        self.core.vocab_size()
    }

    #[pyo3(signature = (text, add_special_tokens = true))]
    fn encode(
        &self,
        py: Python<'_>,
        text: &str,
        add_special_tokens: bool,
    ) -> PyResult<Vec<TokenId>> {
        py.detach(|| self.core.encode(text, add_special_tokens))
            .map_err(to_py)
    }

    #[pyo3(signature = (texts, add_special_tokens = true))]
    fn encode_batch(
        &self,
        py: Python<'_>,
        texts: Vec<String>,
        add_special_tokens: bool,
    ) -> PyResult<Vec<Vec<TokenId>>> {
        py.detach(|| self.core.encode_batch(texts, add_special_tokens))
            .map_err(to_py)
    }

    #[pyo3(signature = (token_ids, skip_special_tokens = false))]
    fn decode(&self, py: Python<'_>, token_ids: Vec<TokenId>, skip_special_tokens: bool) -> String {
        py.detach(|| self.core.decode(&token_ids, skip_special_tokens))
    }

    fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.core.token_to_id(token)
    }

    fn id_to_token(&self, token_id: TokenId) -> Option<String> {
        self.core.id_to_token(token_id)
    }

    fn token_bytes(&self, token_id: TokenId) -> &[u8] {
        self.core.token_bytes(token_id)
    }

    fn special_token_ids(&self) -> Vec<TokenId> {
        self.core.special_token_ids()
    }
}

impl Tokenizer {
    fn wrap(core: Result<CoreTokenizer, TokenizerError>) -> PyResult<Self> {
        Ok(Self {
            core: core.map_err(to_py)?,
        })
    }
}

fn to_py(error: TokenizerError) -> PyErr {
    match &error {
        TokenizerError::Read { source, .. } => {
            io::Error::new(source.kind(), error.to_string()).into()
        }
        _ => PyValueError::new_err(error.to_string()),
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Tokenizer>()
}
