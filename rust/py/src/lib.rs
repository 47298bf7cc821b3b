//! The extension module `octavo._core`: extract, detach from the GIL, call, map errors. No logic lives here.

mod buffers;
mod core;
mod cpu;
mod decoder;
mod frames;
mod output;
mod plan;
mod tokenizer;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    cpu::register(module)?;
    decoder::register(module)?;
    core::register(module)?;
    frames::register(module)?;
    output::register(module)?;
    tokenizer::register(module)?;
    Ok(())
}
