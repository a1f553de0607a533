//! The tensors that a state dict names: which values of which storage, not the values.

use super::Outcome;
use super::objects::{Object, ObjectId, Objects};
use candle_core::{DType, Layout, Shape};
use foretoken_core::error::clipped;

/// Maximum number of dimensions of a tensor. A convolution has up to 5.
const MAX_DIMS: usize = 8;
/// Maximum bytes of a tensor's name.
const MAX_NAME_BYTES: usize = 1024;

/// A tensor in a file. Its values are within its storage, and in the order of rows or of columns.
#[derive(Debug)]
pub struct StoredTensor<'p> {
    /// The storage, which other tensors may share.
    pub storage: &'p str,
    /// Number of values of the storage.
    pub storage_len: usize,
    pub dtype: DType,
    pub layout: Layout,
}

/// The tensors of the state dict `objects`, by name. Other values, such as numbers of versions, are left out.
///
/// # Errors
/// A message that names the tensor, and says what is wrong or not supported.
pub fn tensors<'p>(objects: &Objects<'p>) -> Outcome<Vec<(&'p str, StoredTensor<'p>)>> {
    let Object::Dict(pairs) = objects.root() else {
        return Err("its pickle is no dict of tensors, which a state dict is".to_owned());
    };
    let named = pairs.iter().filter_map(|&(key, value)| {
        let &Object::Text(name) = objects.get(key) else {
            return None;
        };
        if name.len() > MAX_NAME_BYTES {
            return Some(Err(format!(
                "it has a name of {} bytes, over the limit of {MAX_NAME_BYTES}",
                name.len()
            )));
        }
        let tensor = tensor(objects, value).transpose()?;
        Some(match tensor {
            Ok(tensor) => Ok((name, tensor)),
            Err(what) => Err(format!("tensor {}: {what}", clipped(name))),
        })
    });
    named.collect()
}

/// The tensor `value`; `None` if it is none.
fn tensor<'p>(objects: &Objects<'p>, value: ObjectId) -> Outcome<Option<StoredTensor<'p>>> {
    let Some((module, name, arguments)) = call(objects, value) else {
        return Ok(None);
    };
    // What wraps a tensor has it as the first argument, or the call that makes it as the first and the third.
    let inner = match (module, name, arguments) {
        ("torch._utils", "_rebuild_parameter", &[tensor, ..]) => call(objects, tensor),
        ("torch._tensor", "_rebuild_from_type_v2", &[function, _, arguments, ..]) => {
            called(objects, function, arguments)
        }
        _ => Some((module, name, arguments)),
    };
    match inner {
        Some(("torch._utils", "_rebuild_tensor_v2", arguments)) => {
            rebuilt(objects, arguments).map(Some)
        }
        Some((_, other, _)) if other.starts_with("_rebuild") => Err(format!(
            "{} is not supported: only _rebuild_tensor_v2 is",
            clipped(other)
        )),
        Some(_) => Ok(None),
        None => Err("it is invalid".to_owned()),
    }
}

/// Module, name and arguments of a call.
type Called<'o, 'p> = (&'p str, &'p str, &'o [ObjectId]);

fn call<'o, 'p>(objects: &'o Objects<'p>, id: ObjectId) -> Option<Called<'o, 'p>> {
    match *objects.get(id) {
        Object::Call(function, arguments) => called(objects, function, arguments),
        _ => None,
    }
}

fn called<'o, 'p>(
    objects: &'o Objects<'p>,
    function: ObjectId,
    arguments: ObjectId,
) -> Option<Called<'o, 'p>> {
    match (objects.get(function), objects.get(arguments)) {
        (&Object::Global(module, name), Object::Sequence(arguments)) => {
            Some((module, name, arguments))
        }
        _ => None,
    }
}

/// The tensor of the arguments storage, offset, size and stride, and others that do not matter:
/// <https://github.com/pytorch/pytorch/blob/v2.9.0/torch/_utils.py#L210>.
fn rebuilt<'p>(objects: &Objects<'p>, arguments: &[ObjectId]) -> Outcome<StoredTensor<'p>> {
    let invalid = || "it is invalid".to_owned();
    let &[storage, offset, size, stride, ..] = arguments else {
        return Err(invalid());
    };
    let (storage, dtype, storage_len) = self::storage(objects, storage)?.ok_or_else(invalid)?;
    let offset = count(objects, offset).ok_or_else(invalid)?;
    let (dims, stride) = (counts(objects, size), counts(objects, stride));
    let (dims, stride) = dims.zip(stride).ok_or_else(invalid)?;
    if dims.len() > MAX_DIMS {
        return Err(format!(
            "it has {} dimensions; up to {MAX_DIMS} are supported",
            dims.len()
        ));
    }
    if stride.len() != dims.len() {
        return Err(invalid());
    }
    // Without the zeros, as partial products must not overflow either.
    let product = (dims.iter()).try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)));
    let len = if dims.contains(&0) { Some(0) } else { product };
    let end = (product.and(len)).and_then(|len| len.checked_add(offset));
    if end.is_none_or(|end| end > storage_len) {
        return Err(format!(
            "its shape {dims:?} from value {offset} on needs more than the {storage_len} values of its storage"
        ));
    }
    let layout = Layout::new(Shape::from(dims), stride, offset);
    if !layout.is_contiguous() && !layout.is_fortran_contiguous() {
        return Err(format!(
            "its strides {:?} are not supported: its values must be contiguous",
            layout.stride()
        ));
    }
    Ok(StoredTensor {
        storage,
        storage_len,
        dtype,
        layout,
    })
}

/// Key, dtype and number of values of the storage `id`; `None` if it is none.
fn storage<'p>(objects: &Objects<'p>, id: ObjectId) -> Outcome<Option<(&'p str, DType, usize)>> {
    let Object::Persistent(description) = *objects.get(id) else {
        return Ok(None);
    };
    // "storage", a class, a key, a device and a number of values.
    let Object::Sequence(description) = objects.get(description) else {
        return Ok(None);
    };
    let &[_, class, key, _, len] = &description[..] else {
        return Ok(None);
    };
    let (&Object::Global(_, class), &Object::Text(key)) = (objects.get(class), objects.get(key))
    else {
        return Ok(None);
    };
    let Some(len) = count(objects, len) else {
        return Ok(None);
    };
    Ok(Some((key, dtype(class)?, len)))
}

fn dtype(class: &str) -> Outcome<DType> {
    Ok(match class {
        "FloatStorage" => DType::F32,
        "DoubleStorage" => DType::F64,
        "HalfStorage" => DType::F16,
        "BFloat16Storage" => DType::BF16,
        "ByteStorage" | "BoolStorage" => DType::U8,
        "ShortStorage" => DType::I16,
        "IntStorage" => DType::I32,
        "LongStorage" => DType::I64,
        other => return Err(format!("a {} is not supported", clipped(other))),
    })
}

fn counts(objects: &Objects<'_>, id: ObjectId) -> Option<Vec<usize>> {
    match objects.get(id) {
        Object::Sequence(items) => items.iter().map(|&item| count(objects, item)).collect(),
        _ => None,
    }
}

fn count(objects: &Objects<'_>, id: ObjectId) -> Option<usize> {
    match *objects.get(id) {
        Object::Int(n) => usize::try_from(n).ok(),
        _ => None,
    }
}
