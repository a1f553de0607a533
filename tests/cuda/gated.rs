//! Products with gate and up that also apply the activation: the bits of products and activation one after the other.

use super::gpu;
use super::quantized::{kinds, noise, shapes, values, weight};
use candle_core::{DType, Device, Tensor};
use foretoken::kernels::dense::{gated_on_device, matmul_on_device};
use foretoken::kernels::quant::{BlockType, gated_quantized, matmul_quantized};
use foretoken::kernels::{Activation, glu};

const ACTIVATIONS: [Activation; 3] = [Activation::Silu, Activation::Gelu, Activation::GeluTanh];

/// Compares what `gated` and `plain` give rows of so many inputs; `plain` is a product whose outputs are gates and up.
fn compare(
    what: &str,
    (gpu, dtype, inputs): (&Device, DType, usize),
    gated: impl Fn(&Tensor, Activation) -> Option<Tensor>,
    plain: impl Fn(&Tensor) -> Tensor,
) {
    for (i, rows) in [1, 8, 9, 16, 3].into_iter().enumerate() {
        let x = noise(rows, inputs, dtype, gpu);
        let activation = ACTIVATIONS[i % 3];
        let got = gated(&x, activation).unwrap();
        let want = glu(&plain(&x), activation).unwrap();
        assert!(
            values(&got) == values(&want),
            "{what}: {rows} rows, {activation:?}"
        );
    }
    let x = noise(17, inputs, dtype, gpu);
    assert!(gated(&x, Activation::Silu).is_none(), "{what}: 17 rows");
    let x = noise(2, inputs, dtype, gpu);
    assert!(gated(&x, Activation::Relu2).is_none(), "{what}: no gate");
}

#[test]
fn quantized_weights_give_the_bits_of_product_and_activation() {
    let gpu = gpu();
    let small = kinds().flat_map(|kind| {
        // The activation alone takes even numbers of outputs.
        let even = (shapes(kind).iter().copied()).filter(|(outputs, _)| outputs % 2 == 0);
        even.chain([(38, 768)]).map(move |shape| (kind, shape))
    });
    // So many outputs that fewer warps share the inputs.
    let large = [BlockType::Q4K, BlockType::Q6K, BlockType::Q8_0];
    for (kind, shape) in small.chain(large.map(|kind| (kind, (4230, 512)))) {
        let (gate, up) = (weight(kind, shape, &gpu).0, weight(kind, shape, &gpu).0);
        let weights = [&gate, &up];
        for dtype in [DType::F16, DType::BF16] {
            compare(
                &format!("{kind} {shape:?} {dtype:?}"),
                (&gpu, dtype, shape.1),
                |x, activation| gated_quantized(&weights, x, activation).unwrap(),
                |x| matmul_quantized(&weights, x, false).unwrap(),
            );
        }
    }
    let other = weight(BlockType::Q8_0, (48, 256), &gpu).0;
    let gate = weight(BlockType::Q4K, (48, 256), &gpu).0;
    let x = noise(2, 256, DType::BF16, &gpu);
    let mixed = gated_quantized(&[&gate, &other], &x, Activation::Silu).unwrap();
    assert!(mixed.is_none(), "weights of different formats");
}

#[test]
fn dense_weights_give_the_bits_of_product_and_activation() {
    let gpu = gpu();
    for (width, inputs) in [(48, 64), (38, 288), (2120, 96)] {
        for dtype in [DType::F16, DType::BF16] {
            let weight = noise(2 * width, inputs, dtype, &gpu);
            compare(
                &format!("[{width}, {inputs}] {dtype:?}"),
                (&gpu, dtype, inputs),
                |x, activation| gated_on_device(&weight, x, activation).unwrap(),
                |x| matmul_on_device(&weight, x, false).unwrap(),
            );
        }
    }
}

/// With a gate and alone. Infinite values become those of large ones, as in f16.
#[test]
fn the_squared_relu_of_nan_is_nan_as_on_the_cpu() {
    let gpu = gpu();
    let rows = [
        [f32::NAN, 2., 1., f32::NAN],
        [f32::NEG_INFINITY, 3., 2., 2.],
    ];
    let here = Tensor::new(&rows, &Device::Cpu).unwrap();
    let relu2 = Activation::Relu2;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let there = here.to_dtype(dtype).unwrap().to_device(&gpu).unwrap();
        let both = [&here, &there];
        let (gated, alone) = (both.map(|x| glu(x, relu2)), both.map(|x| relu2.apply(x)));
        for pair in [gated, alone] {
            let [want, got] = pair.map(|out| values(&out.unwrap()).concat());
            let same = |(a, b): (&f32, &f32)| a == b || a.is_nan() && b.is_nan();
            assert!(want[0].is_nan(), "{want:?}");
            assert!(
                want.iter().zip(&got).all(same),
                "{dtype:?}: {got:?}, not {want:?}"
            );
        }
    }
}
