//! Reading and writing at an offset of a file. No position is shared, so that threads may do so at the same time.

#[cfg(unix)]
pub use std::os::unix::fs::FileExt;
#[cfg(windows)]
pub use windows::FileExt;

#[cfg(windows)]
mod windows {
    use std::fs::File;
    use std::io::{self, ErrorKind};
    use std::os::windows::fs::FileExt as _;

    /// The functions of Unix's trait of this name that are used here.
    pub trait FileExt {
        /// Fills `bytes` with what the file has from `offset` on.
        ///
        /// # Errors
        /// `UnexpectedEof`, if it has less.
        fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;

        /// Writes all of `bytes` at `offset`.
        ///
        /// # Errors
        /// If there is no room for them.
        fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    }

    impl FileExt for File {
        fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
            in_pieces(bytes.len(), ErrorKind::UnexpectedEof, |done| {
                self.seek_read(&mut bytes[done..], offset + done as u64)
            })
        }

        fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            in_pieces(bytes.len(), ErrorKind::WriteZero, |done| {
                self.seek_write(&bytes[done..], offset + done as u64)
            })
        }
    }

    /// Calls `next` with the number of bytes that are done, until all `len` are; `end` is the error where it does none.
    fn in_pieces(
        len: usize,
        end: ErrorKind,
        mut next: impl FnMut(usize) -> io::Result<usize>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < len {
            match next(done) {
                Ok(0) => return Err(end.into()),
                Ok(bytes) => done += bytes,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
