//! One file: a header, and the bytes of a block or of a state.

use foretoken_core::kv::BlockName;
use std::io::{self, Read, Write};

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The pool whose blocks, or states, have its shape and were computed alike.
    pub pool: BlockName,
    /// Its own name.
    pub name: BlockName,
    /// Number of blocks before it.
    pub depth: usize,
}

/// Bytes before the contents.
pub const HEADER_BYTES: usize = 64;

/// Begins each file; ends with the version of the format.
const MAGIC: [u8; 8] = *b"FTPREFX1";

/// The header: what the contents are, their length, and checksums of contents and header.
fn header(entry: &Entry, contents: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&MAGIC);
    header[8..24].copy_from_slice(&entry.pool.0);
    header[24..40].copy_from_slice(&entry.name.0);
    header[40..48].copy_from_slice(&(contents.len() as u64).to_le_bytes());
    header[48..52].copy_from_slice(&crc32fast::hash(contents).to_le_bytes());
    let checksum = crc32fast::hash(&header[..60]);
    header[60..].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// Writes a file.
///
/// # Errors
/// If it cannot be written as a whole.
pub fn write(file: &mut impl Write, entry: &Entry, contents: &[u8]) -> io::Result<()> {
    file.write_all(&header(entry, contents))?;
    file.write_all(contents)
}

/// The contents of a file of `length` bytes, which must have `bytes` of contents.
///
/// # Errors
/// If it cannot be read, or holds something else.
pub fn read(file: &mut impl Read, length: u64, entry: &Entry, bytes: usize) -> io::Result<Vec<u8>> {
    let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    if length != (HEADER_BYTES + bytes) as u64 {
        return wrong("its length is another one");
    }
    let mut found = [0; HEADER_BYTES];
    file.read_exact(&mut found)?;
    let mut contents = Vec::with_capacity(bytes);
    file.take(bytes as u64).read_to_end(&mut contents)?;
    if contents.len() != bytes {
        return wrong("its end is missing");
    }
    let wanted = header(entry, &contents);
    if found == wanted {
        return Ok(contents);
    }
    wrong(if found[..8] != MAGIC {
        "it does not begin as such files do"
    } else if found[8..24] != wanted[8..24] {
        "it is of another model, or was computed in another way"
    } else if found[24..40] != wanted[24..40] {
        "it is of another text"
    } else {
        "a checksum is wrong"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: Entry = Entry {
        pool: BlockName([1; 16]),
        name: BlockName([2; 16]),
        depth: 0,
    };

    /// A file, and what reading it as `entry` says.
    fn read_as(file: &[u8], entry: &Entry, bytes: usize) -> Result<Vec<u8>, String> {
        let length = file.len() as u64;
        read(&mut &*file, length, entry, bytes).map_err(|damage| damage.to_string())
    }

    #[test]
    fn only_the_whole_file_of_the_same_block_is_taken() {
        let contents: Vec<u8> = (0..100).collect();
        let mut file = Vec::new();
        write(&mut file, &ENTRY, &contents).unwrap();
        assert_eq!(read_as(&file, &ENTRY, 100).unwrap(), contents);
        let wrong = |file: &[u8], entry: &Entry| read_as(file, entry, 100).unwrap_err();
        for len in [0, 10, HEADER_BYTES, file.len() - 1] {
            assert!(wrong(&file[..len], &ENTRY).contains("length"), "{len}");
        }
        assert!(read_as(&file, &ENTRY, 99).unwrap_err().contains("length"));
        let other_pool = Entry {
            pool: BlockName([3; 16]),
            ..ENTRY
        };
        assert!(wrong(&file, &other_pool).contains("another model"));
        let other_name = Entry {
            name: BlockName([3; 16]),
            ..ENTRY
        };
        assert!(wrong(&file, &other_name).contains("another text"));
        for place in 0..file.len() {
            let mut damaged = file.clone();
            damaged[place] ^= 4;
            assert!(read_as(&damaged, &ENTRY, 100).is_err(), "byte {place}");
        }
    }
}
