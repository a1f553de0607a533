//! The flags of how models are loaded.

use crate::convert;
use crate::error::{Error, Result};
use crate::kernels::quant::BlockType;
use crate::kv::KvCacheDtype;
use crate::model::LoadFormat;
use crate::parse::{number, seed, threads, up_to};
use clap::{ArgAction, Args, ValueEnum};

/// Maximum number of GPUs over which a model is spread.
const MAX_GPUS: usize = 64;

/// How the target and the draft are loaded.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct LoadFlags {
    /// Data type of weights and KV cache; auto = that of the checkpoint, but an f16 cache on the CPU.
    /// Quantized weights stay as they are. With bf16 the CPU reads long prompts faster if it has AVX512-BF16,
    /// since attention then multiplies in bf16.
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Dtype,
    /// Data type of the KV cache of the target and of a draft; auto = see --dtype. q8_0 = blocks of 32 values of a head
    /// with 8 bits each and a scale, which take 53 % of the memory of f16; needs heads of a multiple of 32 values.
    /// fp8 = E4M3 without scales, on a GPU; needs heads of a multiple of 16 values. A GPU takes f32, bf16 and f16 only if it
    /// computes in that type.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t)]
    pub kv_cache_dtype: KvCacheDtype,
    /// Device: auto, cpu, cuda or cuda:N.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Spread the layers of the model over N GPUs, from that of --device on, for models that do not fit one. Texts are
    /// those of one GPU. Drafts, embedding and output layer are on the first GPU. Steps are not replayed as CUDA graphs.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = up_to::<MAX_GPUS>)]
    pub pipeline_parallel_size: usize,
    /// The shares of the weights of the GPUs of --pipeline-parallel-size, for example 3,5 [default: equal ones].
    #[arg(long, value_name = "SHARES", value_delimiter = ',', value_parser = share)]
    pub tensor_split: Vec<f64>,
    /// On a GPU, launch kernels one by one instead of replaying decode steps as CUDA graphs.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub enforce_eager: bool,
    /// On a GPU of compute capability 9.0 or higher, compute all layers of a model in one launch for up to 16 rows, with
    /// the same bits. Not faster than kernel by kernel when it was last measured.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub one_launch: bool,
    /// On a GPU, use only kernels that compute a row to the same bits in any step, so that no text
    /// depends on other requests, drafts or prompt chunks; slower. On the CPU this always holds.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub batch_invariant: bool,
    /// Convert the weights of safetensors, of the target and of a draft, to these blocks while they are
    /// loaded. Where rows are not whole blocks, they become q8_0 or stay as they are. See --draft-quantize.
    #[arg(long, value_name = "TYPE", value_parser = convert::block_kinds())]
    pub quantize: Option<BlockType>,
    /// On a GPU, keep the experts of the first N layers in the host's memory, where the GPU reads those that are chosen.
    /// Saves GPU memory and is slower.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub n_cpu_moe: usize,
    /// As --n-cpu-moe, for all layers.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", default_value = "false", action = ArgAction::Set)]
    pub cpu_moe: bool,
    /// CPU compute threads [default: the physical cores available to this process].
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,
    /// dummy = random weights of the model's shapes; reads only config.json.
    #[arg(long, value_enum, default_value_t)]
    pub load_format: LoadFormat,
    /// Seed for dummy weights, random bench prompts and generated texts; -1 = a random one.
    #[arg(long, default_value_t = 0, value_parser = seed, allow_negative_numbers = true)]
    pub seed: u64,
}

impl LoadFlags {
    /// Checks that flags which belong together are given together, and those that exclude each other are not.
    ///
    /// # Errors
    /// `Setup`, naming the flags.
    pub(super) fn check_conflicts(&self) -> Result<()> {
        let (shares, gpus) = (self.tensor_split.len(), self.pipeline_parallel_size);
        if shares > 0 && shares != gpus {
            return Err(Error::setup(format!(
                "--tensor-split has {shares} shares and --pipeline-parallel-size is {gpus}: give a share for each GPU"
            )));
        }
        if self.one_launch && gpus > 1 {
            return Err(Error::setup(
                "--one-launch computes all layers on one GPU: leave it out with --pipeline-parallel-size",
            ));
        }
        Ok(())
    }

    /// The layers, the first ones, whose experts stay in the host's memory on a GPU.
    pub fn host_expert_layers(&self) -> usize {
        if self.cpu_moe {
            usize::MAX
        } else {
            self.n_cpu_moe
        }
    }
}

/// Parses the share of a GPU.
fn share(text: &str) -> std::result::Result<f64, String> {
    let accepted = "a number above 0, such as 3 or 0.4";
    number(accepted, |&n: &f64| n > 0. && n.is_finite())(text)
}

/// Data type of weights and KV cache.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs, reason = "the names of values say it")]
pub enum Dtype {
    /// The data type of the checkpoint; on the CPU, f16 for the KV cache.
    #[default]
    Auto,
    #[value(alias = "float32")]
    F32,
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16")]
    F16,
}
