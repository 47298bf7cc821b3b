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

/// Names the content of a block and of all blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// Names the same tokens' content in the layers of a cache group.
    #[must_use]
    pub fn of_group(self, group: usize) -> Self {
        Self(self.0 ^ group as u128)
    }
}

/// The number of a step, from 1, in the order of planning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

/// Place of a sequence in the engine's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqIdx(pub u32);

/// Place of a request in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestIdx(pub u32);

/// A token of the model's vocabulary.
pub type TokenId = u32;
