//! The model: the state after a token is a hash of everything before it. The next token is mostly a successor of the
//! newest, so that texts repeat themselves, and now and then a hash of that state and the request's seed. `expected` is
//! the whole engine in ten lines.

use octavo_core::protocol::{AddRequest, FinishReason};

const FNV_PRIME: u64 = 0x0000_0100_0000_01b3;

pub fn mix(state: u64, value: u64) -> u64 {
    let mut mixed = (state ^ value).wrapping_mul(FNV_PRIME);
    mixed ^= mixed >> 29;
    mixed = mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ (mixed >> 32)
}

/// The KV state after `token` at `position`.
pub fn next_state(previous: u64, token: u32, position: u32) -> u64 {
    mix(
        mix(previous, u64::from(token) + 1),
        u64::from(position) << 32,
    )
}

/// What is sampled behind `token` from a state by sequence `index` of a request with these params.
pub fn sample(state: u64, token: u32, params: &[u8], index: u32, vocab_size: u32) -> u32 {
    let seed = params
        .iter()
        .fold(7, |seed, byte| mix(seed, u64::from(*byte)));
    let hash = mix(mix(state, seed), u64::from(index));
    if hash >> 61 > 0 {
        return (token * 3 + 1) % vocab_size.min(7);
    }
    (hash % u64::from(vocab_size)) as u32
}

/// The tokens of sequence `index`, computed one by one without any engine.
pub fn expected(
    request: &AddRequest,
    index: u32,
    vocab_size: u32,
    max_len: u32,
) -> (Vec<u32>, FinishReason) {
    let mut tokens = request.prompt_token_ids.clone();
    let num_prompt = tokens.len();
    let max_output = request.max_tokens.min(max_len - num_prompt as u32) as usize;
    let mut state = (0..).zip(&tokens).fold(0, |state, (position, token)| {
        next_state(state, *token, position)
    });
    loop {
        let last = tokens[tokens.len() - 1];
        let token = sample(state, last, &request.params, index, vocab_size);
        state = next_state(state, token, tokens.len() as u32);
        tokens.push(token);
        let num_output = tokens.len() - num_prompt;
        let finish = if request.stop_token_ids.contains(&token)
            && num_output >= request.min_tokens as usize
        {
            FinishReason::Stop
        } else if num_output == max_output {
            FinishReason::Length
        } else {
            continue;
        };
        return (tokens.split_off(num_prompt), finish);
    }
}
