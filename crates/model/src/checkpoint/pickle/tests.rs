//! Files of PyTorch, and files of those who wish us ill.

use super::*;
use candle_core::DType;
use std::io::{Cursor, Write};
use zip::write::SimpleFileOptions;

/// What `scripts/make-pickle-fixture.py` wrote with PyTorch.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/torch.pt")
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let wide = tensor.to_dtype(DType::F64).unwrap();
    wide.flatten_all().unwrap().to_vec1().unwrap()
}

fn count(range: std::ops::Range<u32>) -> Vec<f64> {
    range.map(f64::from).collect()
}

#[test]
fn tensors_of_pytorch_are_read() {
    let tensors = read(&fixture()).unwrap();
    assert_eq!(
        names(&fixture()).unwrap(),
        tensors.keys().cloned().collect()
    );
    let shared: Vec<f64> = count(0..24);
    let transposed: Vec<f64> = (0..24).map(|i| f64::from(i % 4 * 6 + i / 4)).collect();
    let permuted: Vec<f64> = (0..24)
        .map(|i| f64::from(i % 2 * 12 + i / 2 % 3 * 4 + i / 6))
        .collect();
    let expected: [(&str, DType, &[usize], Vec<f64>); 18] = [
        ("weight", DType::F32, &[2, 3], count(0..6)),
        ("bias", DType::F32, &[2], vec![-1., 0.5]),
        ("shared", DType::F32, &[4, 6], shared),
        ("shared.rows", DType::F32, &[2, 6], count(6..18)),
        ("shared.transposed", DType::F32, &[6, 4], transposed),
        ("parameter", DType::F32, &[1, 2], vec![1.5, -2.5]),
        ("float64", DType::F64, &[4], count(0..4)),
        ("float16", DType::F16, &[4], count(0..4)),
        ("bfloat16", DType::BF16, &[4], count(0..4)),
        ("int64", DType::I64, &[4], count(0..4)),
        ("int32", DType::I32, &[4], count(0..4)),
        ("int16", DType::I16, &[4], count(0..4)),
        ("uint8", DType::U8, &[4], count(0..4)),
        ("bool", DType::U8, &[4], vec![0., 1., 1., 1.]),
        ("float16.columns", DType::F16, &[4, 3, 2], permuted),
        (
            "int64.large",
            DType::I64,
            &[2],
            vec![-(62f64.exp2()), 62f64.exp2()],
        ),
        ("scalar", DType::F32, &[], vec![7.]),
        ("empty", DType::F32, &[0, 3], vec![]),
    ];
    // A version, a text and a dict are no tensors.
    assert_eq!(tensors.len(), expected.len());
    for (name, dtype, dims, wanted) in expected {
        let tensor = &tensors[name];
        assert_eq!((tensor.dtype(), tensor.dims()), (dtype, dims), "{name}");
        assert_eq!(values(tensor), wanted, "{name}");
    }
}

/// A file with a pickle, and one storage of 6 floats.
fn archive(pickle: &[u8], options: SimpleFileOptions) -> Vec<u8> {
    let floats: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    zipped(&[("m/data.pkl", pickle), ("m/data/0", &floats)], options)
}

fn zipped(entries: &[(&str, &[u8])], options: SimpleFileOptions) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, bytes) in entries {
        zip.start_file(*name, options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    zip.finish().unwrap().into_inner()
}

fn stored() -> SimpleFileOptions {
    SimpleFileOptions::default().compression_method(CompressionMethod::Stored)
}

fn read_bytes(bytes: &[u8]) -> Result<HashMap<String, Tensor>> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    read(file.path())
}

#[track_caller]
fn refusal(bytes: &[u8]) -> String {
    let error = read_bytes(bytes).expect_err("it was read").to_string();
    assert!(error.lines().count() == 1 && error.len() < 1500, "{error}");
    error
}

/// A state dict with the tensor `w` of these numbers, in the storage 0.
fn state_dict(class: &str, len: u32, offset: u32, dims: &[u32], strides: &[u32]) -> Vec<u8> {
    let int = |n: &u32| [b"J", &n.to_le_bytes()[..]].concat();
    let tuple = |ints: &[u32]| {
        let ints: Vec<u8> = ints.iter().flat_map(int).collect();
        [b"(", &ints[..], b"t"].concat()
    };
    [
        b"\x80\x02}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n((",
        &b"X\x07\0\0\0storagectorch\n"[..],
        class.as_bytes(),
        b"\nX\x01\0\0\x000X\x03\0\0\0cpu",
        &int(&len),
        b"tQ",
        &int(&offset),
        &tuple(dims),
        &tuple(strides),
        b"\x89}tRs.",
    ]
    .concat()
}

#[test]
fn the_values_of_a_tensor_are_within_its_storage() {
    let floats = |len, offset, dims: &[u32], strides: &[u32]| {
        archive(
            &state_dict("FloatStorage", len, offset, dims, strides),
            stored(),
        )
    };
    let tensors = read_bytes(&floats(6, 2, &[2, 2], &[2, 1])).unwrap();
    assert_eq!(values(&tensors["w"]), [2., 3., 4., 5.]);
    let max = u32::MAX >> 1;
    for (bytes, wanted) in [
        (floats(6, 3, &[2, 2], &[2, 1]), "tensor w: its shape [2, 2]"),
        (floats(6, max, &[1], &[1]), "from value 2147483647 on"),
        (floats(6, 0, &[max; 8], &[1; 8]), "tensor w: its shape"),
        (
            floats(6, 0, &[0, max, max, max], &[1; 4]),
            "tensor w: its shape",
        ),
        (floats(6, 0, &[1; 9], &[1; 9]), "it has 9 dimensions"),
        (floats(6, 0, &[3], &[2]), "its strides [2]"),
        (floats(6, 0, &[3], &[0]), "its strides [0]"),
        (floats(6, 0, &[3, 1], &[1]), "tensor w: it is invalid"),
        (floats(6, 0, &[u32::MAX], &[1]), "tensor w: it is invalid"),
        (floats(7, 0, &[1], &[1]), "data/0 has 24 bytes, not 28"),
        (floats(max, 0, &[1], &[1]), "data/0 has 24 bytes"),
        (
            archive(&state_dict("QInt8Storage", 6, 0, &[1], &[1]), stored()),
            "tensor w: a QInt8Storage is not supported",
        ),
    ] {
        let found = refusal(&bytes);
        assert!(found.contains(wanted), "{wanted}: {found}");
    }
}

/// Each took memory without end, or ended the process by its stack.
#[test]
fn a_small_pickle_takes_little() {
    let doubled = [&b")"[..], &b"q\0h\0\x86".repeat(40), b"."].concat();
    let nested = [&b")"[..], &[0x85; 1_000_000], b"."].concat();
    let marks = vec![b'('; 1 << 20];
    let claims_text = b"}X\xff\xff\xff\xffw.".to_vec();
    let own_item = b"}q\0X\x01\0\0\0wh\0s.".to_vec();
    let of_itself = b"]q\0h\0ah\0R.".to_vec();
    let long_name = [b"}X\x00\x08\0\0", &[b'w'; 0x800][..], b")s."].concat();
    let of_items = b"ccollections\nOrderedDict\n]\x85R.".to_vec();
    for (pickle, wanted) in [
        (long_name, "has a name of 2048 bytes"),
        (of_items, "a dict of given items"),
        (doubled, "is no dict of tensors"),
        (nested, "has more than 262144 objects"),
        (marks, "ends too early"),
        (claims_text, "ends too early"),
        (of_itself, "is no dict"),
        (vec![b')'; 300_000], "has more than 262144 objects"),
        (vec![b')'; 2 << 20], "over the limit of 1048576"),
        (b"}\x8a\xff".to_vec(), "ends too early"),
        (b"\x8a\x09123456789.".to_vec(), "a number of 9 bytes"),
        (b"cos\nsystem\nX\x02\0\0\0lsR.".to_vec(), "is no dict"),
        (b"(0.".to_vec(), "opcode 0x30"),
        (b"h\x05.".to_vec(), "is invalid"),
        (b")(s.".to_vec(), "is invalid"),
        (b"}(X\x01\0\0\0wu.".to_vec(), "is invalid"),
        (
            b"}X\x01\0\0\0wctorch._utils\n_rebuild_parameter\n)Rs.".to_vec(),
            "_rebuild_parameter is not supported",
        ),
        (
            b"}X\x01\0\0\0wctorch._utils\n_rebuild_tensor_v2\n)Rs.".to_vec(),
            "tensor w: it is invalid",
        ),
        (
            b"}X\x03\0\0\0a\nbctorch._utils\n_rebuild_qtensor\n)Rs.".to_vec(),
            "tensor a b: _rebuild_qtensor is not supported",
        ),
        (Vec::new(), "ends too early"),
    ] {
        let start = std::time::Instant::now();
        let found = refusal(&archive(&pickle, stored()));
        assert!(found.contains(wanted), "{wanted}: {found}");
        assert!(start.elapsed().as_secs() < 30, "{wanted}");
    }
    assert!(
        read_bytes(&archive(&own_item, stored()))
            .unwrap()
            .is_empty()
    );
}

#[test]
fn entries_are_what_the_file_has() {
    let pickle = state_dict("FloatStorage", 6, 0, &[6], &[1]);
    let honest = archive(&pickle, stored());
    assert_eq!(values(&read_bytes(&honest).unwrap()["w"]), count(0..6));

    // As if it was compressed, and as if it was larger, in both of its headers.
    let changed = |at_local: usize, at_central: usize, bytes: &[u8]| {
        let mut file = honest.clone();
        for (magic, at) in [(b"PK\x03\x04", at_local), (b"PK\x01\x02", at_central)] {
            let starts = file.windows(4).enumerate();
            let starts: Vec<_> = starts
                .filter(|(_, window)| window == magic)
                .map(|(start, _)| start)
                .collect();
            assert_eq!(starts.len(), 2);
            file[starts[1] + at..][..bytes.len()].copy_from_slice(bytes);
        }
        refusal(&file)
    };
    assert!(changed(8, 10, &[8, 0]).contains("m/data/0 is compressed"));
    let large = 1_000_000_000u32.to_le_bytes().repeat(2);
    assert!(changed(18, 20, &large).contains("more bytes than it has"));

    let zip = |entries: &[(&str, &[u8])]| zipped(entries, stored());
    for (bytes, wanted) in [
        (b"PK".to_vec(), "no file of torch.save"),
        (zip(&[("m/data/0", b"")]), "must have one data.pkl"),
        (
            zip(&[("a/data.pkl", b"}."), ("b/data.pkl", b"}.")]),
            "must have one data.pkl",
        ),
        (zip(&[("m/data.pkl", &pickle)]), "tensor w: m/data/0"),
        (
            zip(&[("m/data.pkl", b"}."), ("m/byteorder", b"big")]),
            "its byteorder",
        ),
    ] {
        let found = refusal(&bytes);
        assert!(found.contains(wanted), "{wanted}: {found}");
    }
    let little = [("m/data.pkl", &b"}."[..]), ("m/byteorder", b"little")];
    assert!(read_bytes(&zip(&little)).unwrap().is_empty());
}

/// A storage is stored, and kept in memory, once.
#[test]
fn tensors_share_their_storage() {
    let tensors = read(&fixture()).unwrap();
    let place = |name: &str| {
        let (storage, layout) = tensors[name].storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else {
            panic!("{name}");
        };
        let first = storage.as_slice::<f32>().unwrap().as_ptr();
        (first, layout.start_offset())
    };
    let (first, _) = place("shared");
    assert_eq!(place("shared.rows"), (first, 6));
    assert_eq!(place("shared.transposed"), (first, 0));
}
