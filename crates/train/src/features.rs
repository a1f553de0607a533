//! The target's hidden states at all positions of all rows: computed with the distributions, kept in
//! files of at most a gigabyte, and read in any order.
//!
//! A file has, for each position and each tapped layer, the values in f16, or in int8 after one f32 scale, little
//! endian. A JSON file beside the files says what they belong to. The files grow only by whole rows, so a stopped run
//! continues where it was.

use super::identity::Identity;
pub use super::options::Precision;
use super::output::{belongs_to, open_kept, write_json};
use super::positioned::FileExt;
use candle_core::{Device, Tensor};
use foretoken_core::error::{Error, Result};
use foretoken_kernels::parallel;
use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use serde::Serialize;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Maximum bytes of a file.
const MAX_FILE_BYTES: usize = 1 << 30;

/// The rows, layers and format that the hidden states belong to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FeatureShape {
    /// The target and the rows.
    pub rows: Identity,
    /// The tapped layers, and the width of one.
    pub taps: Vec<usize>,
    /// Width of one layer's hidden state, in values.
    pub hidden_size: usize,
    /// How values are stored.
    pub precision: Precision,
}

impl FeatureShape {
    fn tap_bytes(&self) -> usize {
        match self.precision {
            Precision::F16 => 2 * self.hidden_size,
            Precision::Int8 => 4 + self.hidden_size,
        }
    }

    /// Bytes of one position.
    pub fn position_bytes(&self) -> usize {
        self.taps.len() * self.tap_bytes()
    }

    fn row_bytes(&self) -> usize {
        self.rows.seq_len * self.position_bytes()
    }
}

/// Hidden states on disk.
pub struct FeatureStore {
    shape: FeatureShape,
    folder: PathBuf,
    files: Vec<File>,
    rows_a_file: usize,
    /// Number of rows in the files.
    rows: usize,
}

impl FeatureStore {
    /// Opens the files in `folder`. Existing contents are kept if `reuse` is set and there is a note of their shape.
    ///
    /// # Errors
    /// `Setup`, naming the file. With `reuse`, also if the note says that they have another shape; then all files stay
    /// as they are.
    pub fn open(folder: &Path, shape: FeatureShape, reuse: bool) -> Result<Self> {
        Self::with_files_of(folder, shape, reuse, MAX_FILE_BYTES)
    }

    fn with_files_of(
        folder: &Path,
        shape: FeatureShape,
        reuse: bool,
        bytes: usize,
    ) -> Result<Self> {
        let note = folder.join("features.json");
        let fits = reuse && belongs_to(&note, &shape)?;
        let mut store = Self {
            rows_a_file: (bytes / shape.row_bytes()).max(1),
            folder: folder.to_owned(),
            files: Vec::new(),
            rows: 0,
            shape,
        };
        for number in 0..store.shape.rows.rows.div_ceil(store.rows_a_file) {
            let path = store.path(number);
            let wrong = |e| Error::in_file(&path, e);
            let file = open_kept(&path, fits)?;
            let bytes = file.metadata().map_err(wrong)?.len() as usize;
            let rows = (bytes / store.shape.row_bytes()).min(store.rows_a_file);
            // Rows after a gap do not count.
            if store.rows == number * store.rows_a_file {
                store.rows += rows;
            }
            store.files.push(file);
        }
        store.remove_others()?;
        if !fits {
            write_json(&note, &store.shape)?;
        }
        Ok(store)
    }

    /// Removes the files after the last, those of a larger corpus.
    fn remove_others(&self) -> Result<()> {
        let others = (self.files.len()..).map(|number| self.path(number));
        let others: Vec<PathBuf> = others.take_while(|path| path.exists()).collect();
        // The last first: who is interrupted leaves no gap.
        for path in others.iter().rev() {
            std::fs::remove_file(path).map_err(|e| Error::in_file(path, e))?;
        }
        Ok(())
    }

    fn path(&self, number: usize) -> PathBuf {
        self.folder.join(format!("features-{number:05}.bin"))
    }

    /// The tapped layers.
    pub fn taps(&self) -> &[usize] {
        &self.shape.taps
    }

    /// Number of rows that are stored, from the first.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The file of `row`, its number, and the row's offset in it.
    fn place(&self, row: usize) -> (usize, u64) {
        let (file, at) = (row / self.rows_a_file, row % self.rows_a_file);
        (file, (at * self.shape.row_bytes()) as u64)
    }

    /// Stores `values`, `[rows * seq_len, taps * hidden_size]`, as the rows from `first` on, at most the one after the
    /// last.
    ///
    /// # Errors
    /// `Setup`, if a file cannot be written.
    pub fn write(&mut self, first: usize, values: &[f32]) -> Result<()> {
        let shape = &self.shape;
        let row_values = shape.rows.seq_len * shape.taps.len() * shape.hidden_size;
        let mut rows: Vec<&[f32]> = values.chunks_exact(row_values).collect();
        let packed = parallel::map(&mut rows, |values| {
            let mut bytes = Vec::with_capacity(shape.row_bytes());
            for tap in values.chunks_exact(shape.hidden_size) {
                pack(tap, shape.precision, &mut bytes);
            }
            bytes
        });
        for (row, bytes) in (first..).zip(packed) {
            let (number, start) = self.place(row);
            self.files[number]
                .write_all_at(&bytes, start)
                .map_err(|e| Error::in_file(&self.path(number), e))?;
            self.rows = self.rows.max(row + 1);
        }
        Ok(())
    }

    /// Waits until everything is on the disk.
    ///
    /// # Errors
    /// `Setup`, naming the file.
    pub fn sync(&self) -> Result<()> {
        let mut files = self.files.iter().enumerate();
        files.try_for_each(|(number, file)| {
            file.sync_all()
                .map_err(|e| Error::in_file(&self.path(number), e))
        })
    }

    /// The hidden states of the first `positions` positions of `rows`,
    /// `[rows * positions, taps * hidden_size]`.
    ///
    /// # Errors
    /// `Setup`, if a file cannot be read.
    pub fn read(&self, rows: &[usize], positions: usize) -> Result<Tensor> {
        let FeatureShape {
            taps, hidden_size, ..
        } = &self.shape;
        let width = taps.len() * hidden_size;
        let mut values = vec![0f32; rows.len() * positions * width];
        let read = |(&row, values): (&usize, &mut [f32])| -> Result<()> {
            let mut bytes = vec![0u8; positions * self.shape.position_bytes()];
            let (number, start) = self.place(row);
            self.files[number]
                .read_exact_at(&mut bytes, start)
                .map_err(|e| Error::in_file(&self.path(number), e))?;
            let taps = bytes.chunks_exact(self.shape.tap_bytes());
            for (bytes, values) in taps.zip(values.chunks_exact_mut(*hidden_size)) {
                unpack(bytes, self.shape.precision, values);
            }
            Ok(())
        };
        // On the CPU each worker has a pool of its own, of one thread.
        let parts = values.par_chunks_exact_mut(positions * width);
        rows.par_iter().zip(parts).try_for_each(read)?;
        let dims = (rows.len() * positions, width);
        Ok(Tensor::from_vec(values, dims, &Device::Cpu)?)
    }
}

/// Appends one position's hidden state of one layer.
fn pack(values: &[f32], precision: Precision, bytes: &mut Vec<u8>) {
    match precision {
        Precision::F16 => {
            // Beyond the largest f16 would be infinity.
            let max = f16::MAX.to_f32();
            let halves = values.iter().map(|x| f16::from_f32(x.clamp(-max, max)));
            bytes.extend(halves.flat_map(f16::to_le_bytes));
        }
        Precision::Int8 => {
            let largest = values.iter().fold(0f32, |largest, x| largest.max(x.abs()));
            let scale = largest / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            bytes.extend(scale.to_le_bytes());
            bytes.extend(values.iter().map(|x| (x * inverse).round() as i8 as u8));
        }
    }
}

/// Reads the values that [`pack`] has packed.
fn unpack(bytes: &[u8], precision: Precision, values: &mut [f32]) {
    match precision {
        Precision::F16 => {
            let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]);
            let halves: Vec<f16> = bytes.chunks_exact(2).map(half).collect();
            halves.convert_to_f32_slice(values);
        }
        Precision::Int8 => {
            let (scale, bytes) = bytes.split_at(4);
            let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            for (value, &byte) in values.iter_mut().zip(bytes) {
                *value = f32::from(byte as i8) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;

    const HIDDEN: usize = 6;
    const LEN: usize = 3;

    fn shape(precision: Precision) -> FeatureShape {
        FeatureShape {
            rows: Identity {
                model: "m".into(),
                revision: None,
                vocab_size: 9,
                corpus: 7,
                rows: 5,
                seq_len: LEN,
                top_k: 2,
            },
            taps: vec![1, 2],
            hidden_size: HIDDEN,
            precision,
        }
    }

    fn row(number: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 31 + number * 7) as f32).sin() * (1 + i % 12) as f32;
        (0..LEN * 2 * HIDDEN).map(value).collect()
    }

    #[test]
    fn rows_come_back_from_several_files_and_after_a_stop() {
        for (precision, error) in [(Precision::F16, 1e-2), (Precision::Int8, 6e-2)] {
            let folder = tempfile::tempdir().unwrap();
            let shape = shape(precision);
            let two_rows = 2 * shape.row_bytes() + 1;
            let open = |shape: &FeatureShape, reuse| {
                FeatureStore::with_files_of(folder.path(), shape.clone(), reuse, two_rows).unwrap()
            };
            let mut store = open(&shape, true);
            assert_eq!((store.rows(), store.files.len()), (0, 3));
            (0..3).for_each(|number| store.write(number, &row(number)).unwrap());
            drop(store);
            // A row that was not written to its end does not count.
            let last = folder.path().join("features-00001.bin");
            let cut = OpenOptions::new().write(true).open(&last).unwrap();
            cut.set_len(shape.row_bytes() as u64 - 1).unwrap();

            let mut store = open(&shape, true);
            assert_eq!(store.rows(), 2);
            (2..5).for_each(|number| store.write(number, &row(number)).unwrap());
            store.sync().unwrap();
            let order = [4, 0, 3];
            let read = store.read(&order, LEN - 1).unwrap();
            assert_eq!(read.dims(), [3 * (LEN - 1), 2 * HIDDEN]);
            let read = read.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let wanted = order.map(|number| row(number)[..(LEN - 1) * 2 * HIDDEN].to_vec());
            for (got, wanted) in read.iter().zip(wanted.concat()) {
                assert!((got - wanted).abs() < error, "{got} {wanted}");
            }
            assert_eq!(open(&shape, true).rows(), 5);
            // Those of other layers, and of a run that is not continued, are not used.
            let mut other = shape.clone();
            other.taps = vec![0, 2];
            let refused = FeatureStore::with_files_of(folder.path(), other.clone(), true, two_rows);
            let refused = refused.err().unwrap().to_string();
            assert!(refused.contains("taps was [1,2] in"), "{refused}");
            assert_eq!(open(&shape, true).rows(), 5);
            assert_eq!(open(&other, false).rows(), 0);
        }
    }

    #[test]
    fn files_of_a_larger_corpus_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let mut shape = shape(Precision::F16);
        let open = |shape: &FeatureShape, reuse| {
            let a_row = shape.row_bytes();
            FeatureStore::with_files_of(folder.path(), shape.clone(), reuse, a_row).unwrap()
        };
        let mut store = open(&shape, false);
        (0..5).for_each(|number| store.write(number, &row(number)).unwrap());
        drop(store);
        let foreign = [
            "features-7.bin",
            "features-00007.bin.part",
            "features-x.bin",
            "targets.bin",
        ];
        for name in foreign {
            std::fs::write(at(name), "").unwrap();
        }
        shape.rows.rows = 3;
        assert_eq!(open(&shape, false).rows(), 0);
        assert!(at("features-00002.bin").exists());
        assert!(!at("features-00003.bin").exists() && !at("features-00004.bin").exists());
        // One of an earlier corpus beside a run that goes on.
        std::fs::write(at("features-00003.bin"), "").unwrap();
        open(&shape, true);
        assert!(!at("features-00003.bin").exists());
        assert!(foreign.iter().all(|name| at(name).exists()));
    }

    #[test]
    fn no_value_becomes_infinite() {
        for precision in [Precision::F16, Precision::Int8] {
            let mut bytes = Vec::new();
            pack(&[1e6, 0.0, -1e6], precision, &mut bytes);
            let mut values = [0f32; 3];
            unpack(&bytes, precision, &mut values);
            assert!(values[0] > 6e4 && values[0].is_finite() && values[2] < -6e4);
        }
        let mut bytes = Vec::new();
        pack(&[0.0; 3], Precision::Int8, &mut bytes);
        let mut values = [1f32; 3];
        unpack(&bytes, Precision::Int8, &mut values);
        assert_eq!(values, [0.0; 3]);
    }
}
