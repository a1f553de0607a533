use super::*;
use crate::gguf::{Excerpt, ExcerptReader};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file};
use candle_core::{Device, Tensor};
use std::io::Cursor;

/// A file with this metadata and a tensor `w` of 3 rows of 64 values in `Q8_0`.
fn file(metadata: &[(&str, Value)]) -> Vec<u8> {
    let values = Tensor::ones((3, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&values, GgmlDType::Q8_0).unwrap();
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let mut out = Cursor::new(Vec::new());
    gguf_file::write(&mut out, &metadata, &[("w", &tensor)]).unwrap();
    out.into_inner()
}

fn refusal(bytes: Vec<u8>) -> String {
    let error = read(&mut Cursor::new(bytes)).unwrap_err().to_string();
    assert!(error.starts_with("not a readable GGUF file: "), "{error}");
    error
}

/// Where the information about `w` begins after its name: number of dimensions, dimensions, type, offset.
fn after_name(bytes: &[u8]) -> usize {
    let name = [1, 0, 0, 0, 0, 0, 0, 0, b'w'];
    let found = bytes.windows(name.len()).rposition(|at| at == name);
    found.unwrap() + name.len()
}

#[test]
fn a_header_is_what_was_written() {
    let list = Value::Array(vec![Value::String("a".into()), Value::String("b\0".into())]);
    let metadata = [
        ("text", Value::String("x".into())),
        ("list", list),
        ("empty", Value::Array(Vec::new())),
        ("number", Value::U16(7)),
        ("float", Value::F64(0.5)),
        ("yes", Value::Bool(true)),
    ];
    let bytes = file(&metadata);
    let header = read(&mut Cursor::new(&bytes)).unwrap();
    let shown = |key: &str| format!("{:?}", header.metadata[key]);
    assert_eq!(header.metadata.len(), 6);
    assert_eq!(shown("list"), r#"Array([String("a"), String("b")])"#);
    assert_eq!(
        (&*shown("number"), &*shown("float")),
        ("U16(7)", "F64(0.5)")
    );
    let place = &header.tensors["w"];
    assert_eq!(
        (place.kind, &place.dims[..]),
        (BlockType::Q8_0, &[3, 64][..])
    );
    assert_eq!(place.bytes(), 6 * 34);
    let data = &bytes[place.offset as usize..][..place.bytes()];
    // 1 / 127 as a half, 127 times.
    assert!(data.chunks(34).all(|block| block[2..] == [127; 32]));
}

#[test]
fn no_prefix_of_a_file_is_a_file() {
    let bytes = file(&[("list", Value::Array(vec![Value::U8(1); 100]))]);
    let end = read(&mut Cursor::new(&bytes)).unwrap().tensors["w"].clone();
    for len in 0..end.offset as usize + end.bytes() {
        refusal(bytes[..len].to_vec());
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let good = file(&[("key", Value::U32(1))]);
    let at = after_name(&good);
    let with = |at: usize, new: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        refusal(bytes)
    };
    for (at, new, needle) in [
        (0, &b"GGML"[..], "does not begin with GGUF"),
        (4, &[9, 0, 0, 0], "version 9"),
        (8, &[0xff; 8], "tensors; up to 262144"),
        (8, &[0, 0, 2, 0], "no room for 131072 tensors"),
        (16, &[0xff; 8], "keys; up to 65536"),
        (24, &[0xff; 8], "bytes in a string"),
        (24, &[0, 0, 0, 1], "no room for 16777216 bytes"),
        (35, &[99], "key: 99 is no type of a value"),
        (at, &[9], "tensor w: 9 dimensions"),
        (
            at + 4,
            &[0; 8],
            "tensor w: its shape [3, 0] is not possible",
        ),
        (at + 4, &[63], "rows of 63 elements are no blocks of 32"),
        (
            at + 4,
            &[0xe0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            "is not possible",
        ),
        (
            at + 12,
            &[4],
            "tensor w: its shape [4, 64] is more than the file has",
        ),
        (
            at + 20,
            &[34],
            "tensor w: type TQ1_0 is not supported: only F32",
        ),
        (at + 20, &[77], "tensor w: type number 77 is not supported"),
        (at + 24, &[0xff; 8], "more than the file has"),
    ] {
        let error = with(at, new);
        assert!(error.contains(needle), "{needle}: {error}");
    }
    for alignment in [0, 33] {
        let error = refusal(file(&[(ALIGNMENT, Value::U32(alignment))]));
        assert!(error.contains("is no power of two"), "{error}");
    }
    let error = refusal(file(&[("a", Value::U8(1)), ("a", Value::U8(2))]));
    assert!(error.contains("it has a twice"), "{error}");
    let mut deep = Value::U8(1);
    for _ in 0..5 {
        deep = Value::Array(vec![deep]);
    }
    let error = refusal(file(&[("deep", deep)]));
    assert!(
        error.contains("deep: it has over 4 arrays within each other"),
        "{error}"
    );
}

/// A file of some kilobytes could claim hundreds of gigabytes.
#[test]
fn tensors_have_bytes_of_their_own() {
    let values = Tensor::ones((3, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&values, GgmlDType::Q8_0).unwrap();
    let tensors = [("u", &tensor), ("v", &tensor), ("w", &tensor)];
    let mut out = Cursor::new(Vec::new());
    gguf_file::write(&mut out, &[], &tensors).unwrap();
    let good = out.into_inner();
    assert_eq!(read(&mut Cursor::new(&good)).unwrap().tensors.len(), 3);
    let at = after_name(&good) + 24;
    // `u` has 204 bytes, and `v` those from 224 on.
    for (offset, needle) in [
        (0u64, "tensors u and w have bytes in common"),
        (192, "tensors u and w have bytes in common"),
        (224, "tensors v and w have bytes in common"),
        (416, "tensors v and w have bytes in common"),
    ] {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        let error = refusal(bytes);
        assert!(error.contains(needle), "{offset}: {error}");
    }
}

/// Each value of an array of bytes takes 32 bytes of memory.
#[test]
fn arrays_are_limited_together() {
    let half = Value::Array(vec![Value::U8(0); MAX_VALUES as usize / 2 + 1]);
    let error = refusal(file(&[("a", half.clone()), ("b", half)]));
    assert!(
        error.contains("b: its arrays have over 8388608 values"),
        "{error}"
    );
}

/// A file that is elsewhere may claim any length: what is fetched has a limit, and no memory is taken before.
#[test]
fn a_claim_is_not_believed_before_its_bytes_arrive() {
    let mut start = [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes()].concat();
    start.extend(1u64.to_le_bytes());
    // The length of the first key.
    start.extend((1u64 << 30).to_le_bytes());
    let mut sent = 0;
    let fetch = |from: u64, len: u64| {
        sent += len;
        let byte = |place: u64| start.get(place as usize).copied().unwrap_or(b'x');
        Ok((from..from + len).map(byte).collect())
    };
    let limit = 1 << 20;
    let mut reader = ExcerptReader::new(Excerpt::new("m.gguf", 1 << 40), limit, fetch);
    let error = read(&mut reader).unwrap_err().to_string();
    assert!(error.contains("its header is over the limit"), "{error}");
    assert_eq!(sent, limit);
}

/// A header may list any number of tensors, and each that is read may be a request.
#[test]
fn only_the_factors_of_ropes_are_read_beside_a_header() {
    let quantized = |rows: usize| {
        let values = Tensor::ones((rows, 64), candle_core::DType::F32, &Device::Cpu).unwrap();
        QTensor::quantize(&values, GgmlDType::Q8_0).unwrap()
    };
    let (large, small) = (quantized(1 << 14), quantized(1));
    let mut tensors = vec![("large".to_owned(), &large)];
    tensors.extend((0..100).map(|i| (format!("rope_factors_{i}"), &small)));
    tensors.push(("rope_freqs.weight".to_owned(), &small));
    let tensors: Vec<_> = tensors.iter().map(|(name, t)| (&**name, *t)).collect();
    let mut out = Cursor::new(Vec::new());
    gguf_file::write(&mut out, &[], &tensors).unwrap();
    let bytes = out.into_inner();
    let mut requests = 0;
    let fetch = |from: u64, len: u64| {
        requests += 1;
        Ok(bytes[from as usize..][..len as usize].to_vec())
    };
    let excerpt = Excerpt::new("m.gguf", bytes.len() as u64);
    crate::gguf::read_inspected(&mut ExcerptReader::new(excerpt, 1 << 20, fetch)).unwrap();
    assert_eq!(requests, 2);
}
