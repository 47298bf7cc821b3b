//! The extension module `octavo._core`: extract, detach from the GIL, call, map errors. No logic lives here.

mod cpu;
mod frames;
mod output;
mod tokenizer;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    cpu::register(module)?;
    frames::register(module)?;
    output::register(module)?;
    tokenizer::register(module)?;
    Ok(())
}
