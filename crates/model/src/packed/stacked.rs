//! The matrix of one expert, where tensors have those of all experts of a layer.

use crate::checkpoint::raw_tensors::{RawTensor, RawTensors};
use foretoken_core::error::{Error, Result, clipped};
use std::borrow::Cow;

/// The ends of the names of tensors: of a matrix of its own, and of all experts.
const ENDS: [(&str, &str); 3] = [
    (".weight", ""),
    (".weight_scale_inv", "_scale_inv"),
    (".weight_scale", "_scale"),
];
/// The ends of further tensors, which are not read.
const UNREAD: [&str; 2] = ["_input_scale", "_activation_scale"];

/// The tensors of one expert, under the names of a matrix of its own.
pub struct ExpertTensors<'a> {
    parts: Vec<ExpertPart<'a>>,
}

struct ExpertPart<'a> {
    name: String,
    dtype: String,
    dims: Vec<usize>,
    bytes: u64,
    data: Option<Cow<'a, [u8]>>,
}

/// What a matrix of its own would be called, if the tensor `name` has those of all experts.
pub fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// The names of the tensor `name` and of those that belong to it.
pub fn names(name: &str) -> impl Iterator<Item = String> {
    let ends = ENDS.into_iter().map(|(_, end)| end).chain(UNREAD);
    ends.map(move |end| format!("{name}{end}"))
}

impl<'a> ExpertTensors<'a> {
    /// Those of expert `index` of the `count` experts that the tensor `name` of `source` has; `is_transposed` says whether it
    /// has inputs before outputs.
    ///
    /// # Errors
    /// A setup error that names a tensor that has not as many experts.
    pub fn new(
        source: &'a dyn RawTensors,
        name: &str,
        (index, count): (usize, usize),
        is_transposed: bool,
    ) -> Result<Self> {
        let module = module(name);
        let mut parts = Vec::with_capacity(ENDS.len());
        for (end, of_all) in ENDS {
            let stored = format!("{name}{of_all}");
            if !source.has(&stored) {
                continue;
            }
            let RawTensor {
                dtype,
                mut dims,
                bytes,
                data,
            } = source.raw(&stored)?;
            if dims.first() != Some(&count) || index >= count {
                let what = format!("has shape {dims:?}, and must have {count} experts first");
                return Err(Error::setup(format!("tensor {} {what}", clipped(&stored))));
            }
            dims.remove(0);
            let bytes = bytes / count as u64;
            let size = bytes as usize;
            let own = data.map(|data| &data[index * size..][..size]);
            let data = match (&mut dims[..], own) {
                ([rows, columns], own) if is_transposed => {
                    let own = own.map(|own| Cow::Owned(transposed(own, *rows, *columns)));
                    std::mem::swap(rows, columns);
                    own
                }
                (_, own) => own.map(Cow::Borrowed),
            };
            parts.push(ExpertPart {
                name: format!("{module}{end}"),
                dtype,
                dims,
                bytes,
                data,
            });
        }
        Ok(Self { parts })
    }

    fn part(&self, name: &str) -> Option<&ExpertPart<'a>> {
        self.parts.iter().find(|part| part.name == name)
    }
}

impl RawTensors for ExpertTensors<'_> {
    fn has(&self, name: &str) -> bool {
        self.part(name).is_some()
    }

    fn raw(&self, name: &str) -> Result<RawTensor<'_>> {
        let part = self.part(name).ok_or_else(|| {
            let name = clipped(name);
            Error::setup(format!("tensor {name} of all experts is missing"))
        })?;
        Ok(RawTensor {
            dtype: part.dtype.clone(),
            dims: part.dims.clone(),
            bytes: part.bytes,
            data: part.data.as_deref(),
        })
    }
}

/// The values of a matrix of so many rows and columns, column after column.
fn transposed(data: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    let mut out = vec![0; data.len()];
    let size = data.len().checked_div(rows * columns).unwrap_or(0);
    if size == 0 {
        return out;
    }
    for (row, values) in data.chunks_exact(columns * size).enumerate() {
        for (column, value) in values.chunks_exact(size).enumerate() {
            out[(column * rows + row) * size..][..size].copy_from_slice(value);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two experts of two rows and three columns, and a scale for each of them.
    struct Two;

    static WEIGHTS: [u8; 12] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
    /// Of two bytes each.
    static SCALES: [u8; 4] = [1, 0, 2, 0];

    impl RawTensors for Two {
        fn has(&self, name: &str) -> bool {
            ["experts.down", "experts.down_scale"].contains(&name)
        }

        fn raw(&self, name: &str) -> Result<RawTensor<'_>> {
            let (dims, data) = match name {
                "experts.down" => (vec![2, 2, 3], &WEIGHTS[..]),
                _ => (vec![2, 1, 1], &SCALES[..]),
            };
            Ok(RawTensor {
                dtype: "any".into(),
                dims,
                bytes: data.len() as u64,
                data: Some(data),
            })
        }
    }

    #[test]
    fn an_expert_has_its_part_of_each_tensor() {
        let of = |is_transposed| ExpertTensors::new(&Two, "experts.down", (1, 2), is_transposed);
        for (is_transposed, dims, data) in [
            (false, [2, 3], [6, 7, 8, 9, 10, 11]),
            (true, [3, 2], [6, 9, 7, 10, 8, 11]),
        ] {
            let own = of(is_transposed).unwrap();
            let weight = own.raw("experts.down.weight").unwrap();
            assert_eq!(
                (&weight.dims[..], weight.data),
                (&dims[..], Some(&data[..]))
            );
            assert_eq!(weight.bytes, 6);
            let scale = own.raw("experts.down.weight_scale").unwrap();
            assert_eq!(
                (&scale.dims[..], scale.data),
                (&[1, 1][..], Some(&[2, 0][..]))
            );
            assert!(!own.has("experts.down.weight_scale_inv"));
            assert!(own.raw("experts.down.bias").is_err());
        }
        let three = ExpertTensors::new(&Two, "experts.down", (0, 3), false);
        let error = three.err().unwrap().to_string();
        assert!(error.contains("must have 3 experts first"), "{error}");
    }
}
