//! The decoder against candle's own, and against itself: batched, chunked, shuffled, as a tree.

mod common;

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Tensor};
use candle_transformers::models::quantized_llama::ModelWeights;
use common::*;

#[test]
fn smollm2_agrees_with_candles_llama() {
    let path = smollm2_path();
    let mut file = std::fs::File::open(&path).unwrap();
    let content = Content::read(&mut file).unwrap();
    let mut theirs = ModelWeights::from_gguf(content, &mut file, &Device::Cpu).unwrap();
    let mut rig = Rig::new(smollm2(), 16, 16);
    let mut seq = Seq::default();

    // "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    let mut tokens = vec![
        1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
    ];
    for step in 0..16 {
        let new = &tokens[seq.len..];
        let input = Tensor::new(new, &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let reference = theirs.forward(&input, seq.len).unwrap();
        let reference = reference.squeeze(0).unwrap().to_vec1::<f32>().unwrap();
        let ours = rig.feed(&mut seq, &new.to_vec()).pop().unwrap();
        let far = distance(&ours, &reference);
        println!(
            "step {step}: {far} {} {}",
            argmax(&ours),
            argmax(&reference)
        );
        assert!(far < 5.0, "step {step}: logits differ by {far}");
        assert_eq!(argmax(&ours), argmax(&reference), "step {step}");
        tokens.push(argmax(&ours));
    }
}
