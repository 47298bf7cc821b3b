//! Checks of one pointer and of one product of sizes: what the checks of calls are made of.

use crate::error::KernelError;

/// `address` is not null and a multiple of `align`.
pub fn check_pointer<T>(
    name: &'static str,
    pointer: *const T,
    align: usize,
) -> Result<(), KernelError> {
    if pointer.is_null() {
        return Err(KernelError::Null(name));
    }
    if !(pointer as usize).is_multiple_of(align) {
        return Err(KernelError::Unaligned { name, align });
    }
    Ok(())
}

/// The product of sizes times the bytes of a number fits in an address space.
pub fn check_product(
    name: &'static str,
    sizes: &[usize],
    bytes: usize,
) -> Result<usize, KernelError> {
    let product = sizes
        .iter()
        .try_fold(1usize, |product, &size| product.checked_mul(size));
    product
        .filter(|p| {
            p.checked_mul(bytes)
                .is_some_and(|total| isize::try_from(total).is_ok())
        })
        .ok_or(KernelError::Overflow(name))
}
