//! Products of bytes by AMX's tiles: 8 rows of the input by 32 of the weights at once. As instructions: the compiler's own
//! functions for them are not stable.
//!
//! A block of 32 columns has scales of its own, so that sums leave the tiles after each, through memory, and half of a
//! tile's depth is not used: slower than VNNI as it stands (rust/cpu/README.md).

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Rows of the input in a tile.
pub const ROWS: usize = 8;
/// Vectors of weights beside each other.
pub const VECTORS: usize = 2;

/// Sums of a tile.
#[repr(align(64))]
pub struct Sums(pub [[[i32; 16]; VECTORS]; ROWS]);

/// What `ldtilecfg` reads: bytes of a row and rows of each tile.
#[repr(align(64))]
struct Config([u8; 64]);

/// Tiles 0 and 1 are sums; 2 is the input and 3 and 4 weights of 8 steps, 5 to 7 the same of 4 steps.
static CONFIG: Config = {
    let shapes = [
        (64, ROWS as u8),
        (64, ROWS as u8),
        (32, ROWS as u8),
        (64, 8),
        (64, 8),
        (16, ROWS as u8),
        (64, 4),
        (64, 4),
    ];
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < shapes.len() {
        bytes[16 + 2 * tile] = shapes[tile].0;
        bytes[48 + tile] = shapes[tile].1;
        tile += 1;
    }
    Config(bytes)
};

/// The processor has tiles of int8, and the system lets this process use them.
pub fn is_available() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| has_tiles() && is_permitted())
}

#[allow(unused_unsafe)] // they are safe in newer compilers
fn has_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const TILE_AND_INT8: u32 = 0b11 << 24;
    const TILE_STATE: u32 = 0b11 << 17;
    // SAFETY: every x86-64 has cpuid, and xgetbv where the system saves extended states.
    unsafe {
        if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 {
            return false;
        }
        let states: u32;
        asm!("xgetbv", in("ecx") 0, out("eax") states, out("edx") _, options(nomem, nostack));
        __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8
            && states & TILE_STATE == TILE_STATE
    }
}

/// Linux saves tiles only for processes that ask (`arch_prctl`).
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: u64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: u64;
    // SAFETY: this system call touches no memory of the process.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// Have this thread's tiles the shapes that `multiply` uses.
///
/// # Safety
/// `is_available`.
pub unsafe fn begin() {
    // SAFETY: the caller's; the configuration is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) CONFIG.0.as_ptr(), options(nostack)) };
}

/// Give the tiles back, so that the system need not save them.
///
/// # Safety
/// `is_available`.
pub unsafe fn end() {
    // SAFETY: the caller's.
    unsafe { asm!("tilerelease", options(nostack)) };
}

/// `sums` of N (4 or 8) steps: rows of int8 `x`, `x_stride` bytes apart, by steps of unsigned weights, `stride` bytes
/// apart, of two vectors side by side.
///
/// # Safety
/// `begin` came before on this thread; x has `ROWS` rows of 4 N bytes, and there are as many steps of 128 bytes.
#[inline(always)]
pub unsafe fn multiply<const N: usize>(
    x: *const i8,
    x_stride: isize,
    weights: *const u8,
    stride: usize,
    sums: &mut Sums,
) {
    // SAFETY: the caller's; a row of sums is 128 bytes.
    unsafe {
        if N == 8 {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm2, [{x} + {x_stride}]",
                "tileloadd tmm3, [{weights} + {stride}]",
                "tdpbsud tmm0, tmm2, tmm3",
                "tileloadd tmm4, [{weights} + {stride} + 64]",
                "tdpbsud tmm1, tmm2, tmm4",
                "tilestored [{sums} + {width}], tmm0",
                "tilestored [{sums} + {width} + 64], tmm1",
                x = in(reg) x, x_stride = in(reg) x_stride,
                weights = in(reg) weights, stride = in(reg) stride,
                sums = in(reg) sums, width = in(reg) 64 * VECTORS,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags)
            );
        } else {
            asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tileloadd tmm5, [{x} + {x_stride}]",
                "tileloadd tmm6, [{weights} + {stride}]",
                "tdpbsud tmm0, tmm5, tmm6",
                "tileloadd tmm7, [{weights} + {stride} + 64]",
                "tdpbsud tmm1, tmm5, tmm7",
                "tilestored [{sums} + {width}], tmm0",
                "tilestored [{sums} + {width} + 64], tmm1",
                x = in(reg) x, x_stride = in(reg) x_stride,
                weights = in(reg) weights, stride = in(reg) stride,
                sums = in(reg) sums, width = in(reg) 64 * VECTORS,
                out("tmm0") _, out("tmm1") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, preserves_flags)
            );
        }
    }
}
