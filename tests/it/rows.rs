//! A row does not know its neighbours: with every kind of weight, a row has the same bits for every number
//! of rows, and at every position among them.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::quant::QuantMatrix;
use foretoken::model::{Embedding, Linear, Matrix, Packed, Quantized, unquantized};
use std::sync::Arc;

const MOST: usize = 70;

fn noise(seed: u32, dims: (usize, usize)) -> Tensor {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let values = (0..dims.0 * dims.1).map(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2. - 1.
    });
    Tensor::from_vec(values.collect::<Vec<_>>(), dims, &Device::Cpu).unwrap()
}

/// Compares the product of all rows of `x` with products of each of `counts` rows from various first rows.
fn check(what: &str, linear: &Linear, inputs: usize, counts: &[usize]) {
    let x = noise(7, (MOST, inputs));
    let bits = |t: Tensor| -> Vec<Vec<f32>> { t.to_vec2().unwrap() };
    let whole = bits(linear.forward(&x).unwrap());
    for &count in counts {
        let start = count * 13 % (MOST - count + 1);
        let part = x.narrow(0, start, count).unwrap().contiguous().unwrap();
        let got = bits(linear.forward(&part).unwrap());
        for (row, got) in got.iter().enumerate() {
            assert!(
                got == &whole[start + row],
                "{what}: row {row} of {count} has other bits than among {MOST}"
            );
        }
    }
}

fn all_counts() -> Vec<usize> {
    (1..=MOST).collect()
}

/// (inputs, outputs): those of SmolLM2-135M, and ones that do not fill tiles.
const SHAPES: [(usize, usize); 5] = [(576, 576), (576, 192), (576, 1536), (1536, 576), (96, 13)];

#[test]
fn our_8_and_4_bit_products() {
    for (inputs, outputs) in SHAPES {
        let floats = noise(1, (outputs, inputs));
        for dtype in [GgmlDType::Q8_0, GgmlDType::Q4_0, GgmlDType::Q4_1] {
            let blocks = QTensor::quantize(&floats, dtype).unwrap();
            let data = blocks.data().unwrap();
            let matrix = QuantMatrix::from_blocks(dtype, &data, outputs, inputs).unwrap();
            let linear = Linear::new(Arc::new(Packed::new(matrix)), None);
            let what = format!("{dtype:?} {inputs}x{outputs}");
            check(&what, &linear, inputs, &all_counts());
        }
    }
}

#[test]
fn candles_k_quants() {
    for (inputs, outputs) in [(256, 48), (768, 576), (1536, 100), (512, 13)] {
        let floats = noise(2, (outputs, inputs));
        for dtype in [GgmlDType::Q4K, GgmlDType::Q6K] {
            let blocks = QTensor::quantize(&floats, dtype).unwrap();
            let linear = Linear::new(Arc::new(Quantized::new(blocks).unwrap()), None);
            let what = format!("{dtype:?} {inputs}x{outputs}");
            check(&what, &linear, inputs, &all_counts());
        }
    }
}

fn dense(weight: Tensor, dtype: DType) -> Arc<dyn Matrix> {
    unquantized(&weight, Some(dtype)).unwrap()
}

#[test]
fn dense_weights() {
    for (inputs, outputs) in SHAPES {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let linear = Linear::new(dense(noise(3, (outputs, inputs)), dtype), None);
            let what = format!("{dtype:?} {inputs}x{outputs}");
            let few = [
                1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 30, 31, 32, 33, 47, 62, 63, 69, 70,
            ];
            check(&what, &linear, inputs, &few);
        }
    }
}

/// One weight for lookups and products, as in models with tied embeddings.
#[test]
fn an_embedding_reads_rows_of_its_weight() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let rounded = noise(8, (21, 40)).to_dtype(dtype).unwrap();
        let matrix = unquantized(&rounded, None).unwrap();
        let embedding = Embedding::new(matrix, DType::F32);
        let want = rounded.to_dtype(DType::F32).unwrap();
        let ids = Tensor::new(&[20u32, 0, 7, 7], &Device::Cpu).unwrap();
        let got = embedding.forward(&ids).unwrap();
        let picked = want.index_select(&ids, 0).unwrap();
        assert_eq!(
            got.to_vec2::<f32>().unwrap(),
            picked.to_vec2::<f32>().unwrap()
        );
        // The identity reads every column of the weight.
        let identity = Tensor::eye(40, DType::F32, &Device::Cpu).unwrap();
        let columns = embedding.tied_head().forward(&identity).unwrap();
        assert_eq!(
            columns.to_vec2::<f32>().unwrap(),
            want.t().unwrap().to_vec2::<f32>().unwrap()
        );
        let beyond = Tensor::new(&[21u32], &Device::Cpu).unwrap();
        let error = embedding.forward(&beyond).unwrap_err().to_string();
        assert!(error.contains("outside the vocabulary"), "{error}");
    }
}

#[test]
fn a_dense_bias_is_added_to_every_row() {
    let weight = noise(4, (8, 32));
    let bias = noise(5, (1, 8)).squeeze(0).unwrap();
    let x = noise(6, (3, 32));
    let with = Linear::new(dense(weight.clone(), DType::F32), Some(bias.clone()));
    let without = Linear::new(dense(weight, DType::F32), None);
    let want = without.forward(&x).unwrap().broadcast_add(&bias).unwrap();
    assert_eq!(
        with.forward(&x).unwrap().to_vec2::<f32>().unwrap(),
        want.to_vec2::<f32>().unwrap()
    );
}

/// A layer without a bias beside one that has one, of weights that share a call and of ones that do not.
#[test]
fn joined_layers_are_as_each_alone() {
    let x = noise(10, (9, 64));
    let bias = noise(11, (1, 13)).squeeze(0).unwrap();
    for dtypes in [[DType::F32, DType::BF16], [DType::F32; 2]] {
        let blocks = QTensor::quantize(&noise(12, (7, 64)), GgmlDType::Q8_0).unwrap();
        let layers = vec![
            Linear::new(dense(noise(13, (16, 64)), dtypes[0]), None),
            Linear::new(dense(noise(14, (13, 64)), dtypes[1]), Some(bias.clone())),
            Linear::new(Arc::new(Quantized::new(blocks).unwrap()), None),
        ];
        let apart: Vec<Tensor> = layers.iter().map(|l| l.forward(&x).unwrap()).collect();
        let want = Tensor::cat(&apart, 1).unwrap();
        let joined = Linear::join(layers).unwrap().forward(&x).unwrap();
        assert_eq!(
            joined.to_vec2::<f32>().unwrap(),
            want.to_vec2::<f32>().unwrap()
        );
    }
}
