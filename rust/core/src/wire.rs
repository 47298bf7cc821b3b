//! Values as bytes, little-endian: numbers, lists (u32 count first), options (one byte first), tuples.
//!
//! Not here: the messages themselves (`frames`) and the length prefix of a socket frame (`octavo-ipc`).
//! Decoding never panics and never reserves more memory than the input could fill.

use thiserror::Error;

/// Why bytes are not a frame.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("frame ends early: {wanted} bytes wanted at offset {offset}, {left} left")]
    Truncated {
        offset: usize,
        wanted: usize,
        left: usize,
    },
    #[error("frame has {0} bytes after its end")]
    TrailingBytes(usize),
    #[error("frame version {found} is not {expected}: client and engine are of different releases")]
    Version { found: u8, expected: u8 },
    #[error("{what} can't be {value}")]
    Tag { what: &'static str, value: u8 },
    #[error("text in a frame is not UTF-8")]
    Utf8,
}

/// A cursor over one frame.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    /// Bytes not read yet.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.offset
    }

    /// The next `count` bytes.
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], FrameError> {
        let end = self.offset.checked_add(count);
        let Some(taken) = end.and_then(|end| self.bytes.get(self.offset..end)) else {
            return Err(FrameError::Truncated {
                offset: self.offset,
                wanted: count,
                left: self.left(),
            });
        };
        self.offset += count;
        Ok(taken)
    }

    /// The frame must be read to its end.
    pub fn finish(self) -> Result<(), FrameError> {
        match self.left() {
            0 => Ok(()),
            count => Err(FrameError::TrailingBytes(count)),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }
}

/// A value that has a form in bytes.
pub trait Wire: Sized {
    /// The shortest form: a list of `count` values needs at least `count * MIN_BYTES` bytes.
    const MIN_BYTES: usize;

    fn put(&self, out: &mut Vec<u8>);
    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError>;

    /// The values of a list, without its count.
    fn put_all(values: &[Self], out: &mut Vec<u8>) {
        for value in values {
            value.put(out);
        }
    }

    /// `count` values; the caller has checked that the input could hold them.
    fn take_all(reader: &mut Reader<'_>, count: usize) -> Result<Vec<Self>, FrameError> {
        (0..count).map(|_| Self::take(reader)).collect()
    }
}

macro_rules! wire_numbers {
    ($($number:ty),*) => {$(
        impl Wire for $number {
            const MIN_BYTES: usize = size_of::<$number>();

            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
                Ok(Self::from_le_bytes(reader.array()?))
            }

            fn take_all(reader: &mut Reader<'_>, count: usize) -> Result<Vec<Self>, FrameError> {
                const SIZE: usize = size_of::<$number>();
                let bytes = reader.bytes(count.saturating_mul(SIZE))?;
                let (values, _) = bytes.as_chunks::<SIZE>();
                Ok(values.iter().map(|value| Self::from_le_bytes(*value)).collect())
            }
        }
    )*};
}

wire_numbers!(u32, i32, u64, u128, f32, f64);

impl Wire for bool {
    const MIN_BYTES: usize = 1;

    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        match u8::take(reader)? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(FrameError::Tag {
                what: "a yes or no",
                value,
            }),
        }
    }
}

impl Wire for u8 {
    const MIN_BYTES: usize = 1;

    fn put(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let [byte] = reader.array()?;
        Ok(byte)
    }

    fn put_all(values: &[Self], out: &mut Vec<u8>) {
        out.extend_from_slice(values);
    }

    fn take_all(reader: &mut Reader<'_>, count: usize) -> Result<Vec<Self>, FrameError> {
        Ok(reader.bytes(count)?.to_vec())
    }
}

impl<T: Wire> Wire for Vec<T> {
    const MIN_BYTES: usize = 4;

    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        T::put_all(self, out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        let count = u32::take(reader)? as usize;
        let wanted = count.saturating_mul(T::MIN_BYTES);
        if wanted > reader.left() {
            return Err(FrameError::Truncated {
                offset: reader.offset,
                wanted,
                left: reader.left(),
            });
        }
        T::take_all(reader, count)
    }
}

impl<T: Wire> Wire for Option<T> {
    const MIN_BYTES: usize = 1;

    fn put(&self, out: &mut Vec<u8>) {
        u8::from(self.is_some()).put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        match u8::take(reader)? {
            0 => Ok(None),
            1 => Ok(Some(T::take(reader)?)),
            value => Err(FrameError::Tag {
                what: "an option's mark",
                value,
            }),
        }
    }
}

impl Wire for String {
    const MIN_BYTES: usize = 4;

    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        out.extend_from_slice(self.as_bytes());
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Self::from_utf8(Vec::take(reader)?).map_err(|_| FrameError::Utf8)
    }
}

impl<A: Wire, B: Wire> Wire for (A, B) {
    const MIN_BYTES: usize = A::MIN_BYTES + B::MIN_BYTES;

    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
        Ok((A::take(reader)?, B::take(reader)?))
    }
}

/// Implements `Wire` for a struct: its fields in the given order, which is the order on the wire.
macro_rules! wire_struct {
    ($name:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        impl Wire for $name {
            const MIN_BYTES: usize = 0 $(+ <$kind as Wire>::MIN_BYTES)*;

            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
                Ok(Self { $($field: <$kind as Wire>::take(reader)?,)* })
            }
        }
    };
}

/// Implements `Wire` for an enum without fields: one byte, the discriminant.
macro_rules! wire_enum {
    ($name:ident, $what:literal, [$($variant:ident),* $(,)?]) => {
        impl Wire for $name {
            const MIN_BYTES: usize = 1;

            fn put(&self, out: &mut Vec<u8>) {
                out.push(*self as u8);
            }

            fn take(reader: &mut Reader<'_>) -> Result<Self, FrameError> {
                match u8::take(reader)? {
                    $(value if value == Self::$variant as u8 => Ok(Self::$variant),)*
                    value => Err(FrameError::Tag { what: $what, value }),
                }
            }
        }
    };
}

pub(crate) use {wire_enum, wire_struct};
