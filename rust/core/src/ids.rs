//! Newtypes for every id that crosses a function border, so that a slot is never taken for a block.

/// A client connection of the engine. `ClientId::LOCAL` is the in-process one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u32);

impl ClientId {
    /// The client that lives in the engine's own process (`LLM`).
    pub const LOCAL: Self = Self(0);
}

/// A request's number, unique within its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Whose request it is, for fairness; the server hashes the tenant's name. `TenantId::NOBODY` without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u64);

impl TenantId {
    /// Nobody in particular.
    pub const NOBODY: Self = Self(0);
}

/// A sequence's persistent row on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// A fixed number of token positions of KV. Block 0 is the null block: padding rows write there, nobody reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// The number of a step, from 1, in the order of planning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

/// A token of the model's vocabulary.
pub type TokenId = u32;
