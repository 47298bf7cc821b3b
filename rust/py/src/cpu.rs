//! CPU kernels on tensors' addresses. The Python side (`octavo.attention.cpu`) vouches for addresses and sizes;
//! everything read through an index is checked in `octavo_cpu`.

use octavo_cpu::{AttentionArgs, CacheDtype, Isa, KernelError, ThreadPool, WriteArgs};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

fn to_py(error: KernelError) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pyfunction]
fn cpu_features() -> Vec<&'static str> {
    Isa::available().iter().map(|isa| isa.name()).collect()
}

/// Have all kernels of the process use one of `cpu_features`, before the first runs.
#[pyfunction]
fn cpu_restrict(name: &str) -> PyResult<()> {
    Isa::restrict(name).map_err(to_py)
}

/// (bytes read, int8 multiply-adds, f32 multiply-adds) a second of so many threads.
#[pyfunction]
fn cpu_limits(py: Python<'_>, num_threads: usize) -> (f64, f64, f64) {
    let limits = py.detach(|| octavo_cpu::limits::measure(&ThreadPool::new(num_threads)));
    (limits.read_bytes, limits.int8_macs, limits.f32_macs)
}

#[pyfunction]
#[pyo3(signature = (*, q, q_stride, kv_cache, out, dtype, row_slot, query_start, kv_len, block_table, num_rows,
    num_tokens, num_slots, max_blocks_per_slot, num_blocks, block_size, num_heads, num_kv_heads, head_dim, scale, window,
    soft_cap, num_threads))]
fn cpu_paged_attention(
    py: Python<'_>,
    q: usize,
    q_stride: usize,
    kv_cache: usize,
    out: usize,
    dtype: &str,
    row_slot: usize,
    query_start: usize,
    kv_len: usize,
    block_table: usize,
    num_rows: usize,
    num_tokens: usize,
    num_slots: usize,
    max_blocks_per_slot: usize,
    num_blocks: usize,
    block_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    scale: f32,
    window: usize,
    soft_cap: f32,
    num_threads: usize,
) -> PyResult<()> {
    let dtype = dtype.parse().map_err(to_py)?;
    py.detach(|| {
        let args = AttentionArgs {
            q: q as *const u8,
            q_stride,
            kv_cache: kv_cache as *const u8,
            out: out as *mut u8,
            dtype: CacheDtype::Plain(dtype),
            io_dtype: dtype,
            row_slot: row_slot as *const i32,
            query_start: query_start as *const i32,
            kv_len: kv_len as *const i32,
            block_table: block_table as *const i32,
            num_rows,
            num_tokens,
            num_slots,
            max_blocks_per_slot,
            num_blocks,
            block_size,
            num_heads,
            num_kv_heads,
            head_dim,
            scale,
            window,
            soft_cap,
            num_threads,
        };
        // SAFETY: the caller's tensors live during the call and have the sizes given.
        unsafe { octavo_cpu::paged_attention(&args) }
    })
    .map_err(to_py)
}

#[pyfunction]
#[pyo3(signature = (*, k, k_stride, v, v_stride, kv_cache, dtype, slot_mapping, num_tokens, num_blocks, block_size,
    num_kv_heads, head_dim))]
fn cpu_write_kv(
    py: Python<'_>,
    k: usize,
    k_stride: usize,
    v: usize,
    v_stride: usize,
    kv_cache: usize,
    dtype: &str,
    slot_mapping: usize,
    num_tokens: usize,
    num_blocks: usize,
    block_size: usize,
    num_kv_heads: usize,
    head_dim: usize,
) -> PyResult<()> {
    let dtype = dtype.parse().map_err(to_py)?;
    py.detach(|| {
        let args = WriteArgs {
            k: k as *const u8,
            k_stride,
            v: v as *const u8,
            v_stride,
            kv_cache: kv_cache as *mut u8,
            dtype,
            slot_mapping: slot_mapping as *const i64,
            num_tokens,
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
        };
        // SAFETY: the caller's tensors live during the call and have the sizes given.
        unsafe { octavo_cpu::write_kv(&args) }
    })
    .map_err(to_py)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cpu_features, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_limits, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_restrict, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_paged_attention, module)?)?;
    module.add_function(wrap_pyfunction!(cpu_write_kv, module)?)
}
