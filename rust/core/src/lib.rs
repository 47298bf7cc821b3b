//! Octavo's control plane: requests, queue, blocks, prefix hashes, scheduler, tokenizer, detokenizer, frames.
//!
//! No Python, no device code. `Core::step` is the whole boundary of the engine loop: it commits the result of the
//! oldest step in flight and plans the next one. Everything else turns bytes into requests and outputs into bytes.
#![forbid(unsafe_code)]

mod admission;
pub mod arena;
pub mod block_pool;
pub mod cache;
mod check;
pub mod commit;
pub mod config;
pub mod core;
pub mod detokenizer;
pub mod errors;
pub mod frames;
pub mod grammar;
pub mod groups;
mod growth;
mod guided;
mod hold;
pub mod holding;
pub mod ids;
mod intake;
pub mod mailbox;
mod mask_rows;
pub mod media;
pub mod output_processor;
mod outputs;
pub mod pieces;
pub mod plan;
pub mod prefix;
mod prompt_cost;
mod prompts;
pub mod protocol;
pub mod queue;
pub mod queue_load;
pub mod request;
pub mod results;
mod scheduler;
pub mod sequence;
pub mod shared;
pub mod speculation;
pub mod state;
pub mod step_cost;
pub mod step_sizes;
pub mod stop;
pub mod tenants;
pub mod tokenizer;
mod urgency;
pub mod wire;
