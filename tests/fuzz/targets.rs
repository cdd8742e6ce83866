//! The readers, their whole inputs, and what has to hold of what they accept.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use bitstep::cpu::CpuBackend;
use bitstep::cpu::context::CpuContext;
use bitstep::cpu::simd::SimdPath;
use bitstep::data::{BinFile, TokenFormat, Tokenizer};
use bitstep::engine::run::Run;
use bitstep::golden::GoldenFile;
use bitstep::io::checkpoint::{self, LocalDisk, StoredCheckpoint};
use bitstep::io::tensors::TensorFile;
use bitstep::io::{AdapterFolder, ModelFolder, Recipe};
use bitstep::report::RunHistory;

use super::{ACCEPTED, Target};

/// A folder in memory where there is one.
fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    match memory.is_dir() {
        true => tempfile::tempdir_in(memory).expect("a folder"),
        false => tempfile::tempdir().expect("a folder"),
    }
}

fn said<T, E: Display>(result: Result<T, E>, check: impl FnOnce(T)) -> String {
    match result {
        Ok(value) => {
            check(value);
            ACCEPTED.to_owned()
        }
        Err(error) => error.to_string(),
    }
}

/// A target whose reader takes the path of a file named `file`.
fn of_file(
    name: &'static str,
    file: &'static str,
    (seeds, words): (Vec<Vec<u8>>, &'static [&'static str]),
    read: impl Fn(&Path, &[u8]) -> String + 'static,
) -> Target {
    let place = folder();
    let of_input = move |input: &[u8]| {
        let path = place.path().join(file);
        std::fs::write(&path, input).expect("writes");
        read(&path, input)
    };
    Target {
        name,
        seeds,
        words,
        read: Box::new(of_input),
    }
}

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// A small safetensors file with every kind of entry.
fn tensors() -> Vec<u8> {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"#,
        r#""c":{"dtype":"I64","shape":[],"data_offsets":[32,40]},"d":{"dtype":"U8","shape":[0,7],"data_offsets":[40,40]}}"#
    );
    let padded = header.len().next_multiple_of(8);
    let header = format!("{header:padded$}");
    let data: Vec<u8> = (0..40).collect();
    let length = (header.len() as u64).to_le_bytes();
    [length.as_slice(), header.as_bytes(), &data].concat()
}

const TENSOR_WORDS: &[&str] = &[
    "\"F32\"",
    "\"F16\"",
    "\"BF16\"",
    "\"data_offsets\"",
    "\"shape\":[",
    "__metadata__",
    "\\u0000",
    "[[",
    "}}",
];

pub fn safetensors() -> Target {
    let read = |path: &Path, input: &[u8]| {
        said(TensorFile::open(path), |file| {
            let theirs = safetensors::SafeTensors::deserialize(input);
            let theirs = theirs.expect("what is read here is read by the format's own library");
            for name in file.names() {
                let bytes = file.read_bytes(name).expect("every tensor can be read");
                let other = theirs.tensor(name).expect("both know the tensor");
                assert_eq!(bytes, other.data(), "{name}");
                let entry = file.entry(name).expect("an entry");
                assert_eq!(entry.shape.dims(), other.shape());
            }
            assert_eq!(file.names().count(), theirs.len());
        })
    };
    let inputs = (vec![tensors()], TENSOR_WORDS);
    of_file("safetensors", "t.safetensors", inputs, read)
}

pub fn recipe() -> Target {
    let names = ["llama-tiny", "qwen3-tiny-f16", "mamba-tiny", "sums"];
    let seed = |name: &str| std::fs::read(fixture(&format!("golden/{name}.toml"))).expect("reads");
    let read = |input: &[u8]| {
        let Ok(text) = std::str::from_utf8(input) else {
            return "not UTF-8".to_owned();
        };
        said(Recipe::from_toml(text, "r"), |recipe| {
            let canonical = recipe.to_toml().expect("what was read can be written");
            let again = Recipe::from_toml(&canonical, "again").expect("and read again");
            assert_eq!(again, recipe);
            assert_eq!(
                again.hash().expect("a hash"),
                recipe.hash().expect("a hash")
            );
        })
    };
    Target {
        name: "recipe",
        seeds: names.into_iter().map(seed).collect(),
        words: &[
            "[model]\n",
            "[checkpoint]\nevery = 1\n",
            "[evaluation]\nevery = 1\n",
            "precision = \"bf16\"\n",
            "path = \"x\"\n",
            "family = \"mamba\"\n",
            "validation = 0.5\n",
            "= {}",
            "\"\"\"",
            "#",
        ],
        read: Box::new(read),
    }
}

pub fn golden() -> Target {
    let names = ["llama-tiny", "mamba-tiny-bf16"];
    // The steps and a few lines of the rest: whole files are long and all alike.
    let seed = |name: &str| {
        let path = fixture(&format!("golden/{name}.golden"));
        let mut golden = GoldenFile::read(&path).expect("a golden");
        golden.tensors.truncate(6);
        golden.ops.truncate(6);
        golden.to_text().into_bytes()
    };
    let read = |input: &[u8]| {
        let Ok(text) = std::str::from_utf8(input) else {
            return "not UTF-8".to_owned();
        };
        said(GoldenFile::parse(text, "g"), |golden| {
            let again = GoldenFile::parse(&golden.to_text(), "again").expect("read again");
            assert_eq!(again, golden);
        })
    };
    Target {
        name: "golden",
        seeds: names.into_iter().map(seed).collect(),
        words: &[
            "step ",
            "op 0 ",
            "tensor ",
            "loss ",
            "root ",
            "covers ",
            "schema 1\n",
            "\r\n",
        ],
        read: Box::new(read),
    }
}

/// A checkpoint of a tiny run, in `root`.
fn saved(root: &Path) -> PathBuf {
    let text = "name = \"r\"\nsteps = 9\n[model]\nfamily = \"llama\"\nvocab_size = 62\nd_model = 8\n\
                n_layers = 1\nn_heads = 2\nd_ff = 8\n[data]\nbatch = 1\nseq_len = 9\n[optimizer]\nlr = 1e-2\n\
                [precision]\ndomain = \"f16.sm90\"\n";
    let recipe = Recipe::from_toml(text, "r").expect("a recipe");
    let cpu = CpuBackend::new(CpuContext::new(SimdPath::detect(), 1).expect("a context"));
    let mut run = Run::open(recipe, cpu).expect("opens");
    run.step(None).expect("a step");
    let text = run.recipe.to_toml().expect("text");
    let copy = run.host_copy(&text).expect("a copy");
    let state = copy.state().clone();
    checkpoint::save(&LocalDisk, root, state, &copy.tensors()).expect("saves")
}

/// What a damaged checkpoint may never be: accepted with other tensors than were written.
fn same_tensors(whole: &StoredCheckpoint, found: &StoredCheckpoint) {
    for (name, tensor) in &found.tensors {
        let written = whole.tensors.get(name).expect("a tensor that was written");
        assert_eq!(tensor.bytes, written.bytes, "{name}");
    }
}

/// `state.json` with a digest that fits it, so that what stands behind the digest is reached too.
pub fn checkpoint_state() -> Target {
    let place = folder();
    let saved = saved(place.path());
    let whole = checkpoint::read(&saved).expect("reads");
    let seed = std::fs::read(saved.join(checkpoint::STATE)).expect("reads");
    let read = move |input: &[u8]| {
        let _place = &place;
        std::fs::write(saved.join(checkpoint::STATE), input).expect("writes");
        let digest = format!("{}\n", blake3::hash(input));
        std::fs::write(saved.join(checkpoint::STATE_DIGEST), digest).expect("writes");
        said(checkpoint::read(&saved), |found| {
            same_tensors(&whole, &found)
        })
    };
    Target {
        name: "checkpoint state",
        seeds: vec![seed],
        words: &[
            "\"format\": 1,",
            "\"step\": ",
            "\"blake3\": \"",
            "null",
            "{",
            "]",
            "\"lr\": 1e999",
        ],
        read: Box::new(read),
    }
}

/// The tensors of a checkpoint under a state that is whole.
pub fn checkpoint_tensors() -> Target {
    let place = folder();
    let saved = saved(place.path());
    let whole = checkpoint::read(&saved).expect("reads");
    let seed = std::fs::read(saved.join(checkpoint::TENSORS)).expect("reads");
    let read = move |input: &[u8]| {
        let _place = &place;
        std::fs::write(saved.join(checkpoint::TENSORS), input).expect("writes");
        said(checkpoint::read(&saved), |found| {
            same_tensors(&whole, &found);
            assert_eq!(found.tensors.len(), whole.tensors.len());
        })
    };
    Target {
        name: "checkpoint tensors",
        seeds: vec![seed],
        words: TENSOR_WORDS,
        read: Box::new(read),
    }
}

/// Token files in each of the three forms; the first byte of an input says which.
pub fn tokens() -> Target {
    let place = folder();
    let mut llmc = vec![0u8; 1024];
    llmc[..4].copy_from_slice(&20_240_520i32.to_le_bytes());
    llmc[4..8].copy_from_slice(&1i32.to_le_bytes());
    llmc[8..12].copy_from_slice(&5i32.to_le_bytes());
    llmc.extend([1, 0, 2, 0, 3, 0, 4, 0, 5, 0]);
    let seed = |form: u8, bytes: &[u8]| [&[form], bytes].concat();
    let seeds = vec![
        seed(0, &[1, 0, 2, 0, 3, 0]),
        seed(1, &[1, 0, 0, 0, 2, 0, 0, 0]),
        seed(2, &llmc),
    ];
    let read = move |input: &[u8]| {
        let Some((form, bytes)) = input.split_first() else {
            return "empty".to_owned();
        };
        let formats = [TokenFormat::U16, TokenFormat::U32, TokenFormat::LlmC];
        let format = formats[usize::from(*form) % formats.len()];
        let path = place.path().join("t.bin");
        std::fs::write(&path, bytes).expect("writes");
        let read = BinFile::open(&path, format).and_then(|file| {
            let count = file.tokens();
            assert!(
                count * 2 <= bytes.len() as u64,
                "no more tokens than bytes for them"
            );
            assert!(
                file.read(count, 1, 64).is_err(),
                "nothing stands behind the last"
            );
            assert!(file.read(u64::MAX, 2, 64).is_err());
            file.read(0, count as usize, 64)
        });
        said(read, |tokens| {
            assert!(tokens.iter().all(|token| *token < 64))
        })
    };
    Target {
        name: "tokens",
        seeds,
        words: &[],
        read: Box::new(read),
    }
}

/// Tokenizers of three kinds.
const TOKENIZERS: [&str; 3] = [
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":4,"content":"<s>","single_word":false,
    "lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":{"type":"NFC"},
    "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},
    "post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},
    "model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,
    "fuse_unk":false,"byte_fallback":false,"vocab":{"a":0,"b":1,"ab":2,"abb":3},"merges":["a b","ab b"]}}"#,
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
    "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
    "model":{"type":"WordLevel","vocab":{"ab":0,"[UNK]":1},"unk_token":"[UNK]"}}"#,
    r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
    "pre_tokenizer":{"type":"Metaspace","replacement":"_","prepend_scheme":"always","split":true},"post_processor":null,
    "decoder":null,"model":{"type":"Unigram","unk_id":0,"vocab":[["<unk>",0.0],["a",-1.0],["b",-2.0],["_a",-1.5]],
    "byte_fallback":false}}"#,
];

pub fn tokenizer() -> Target {
    let seeds = TOKENIZERS.map(|text| text.as_bytes().to_vec()).to_vec();
    let words: &[&str] = &[
        "\"type\":\"BPE\"",
        "\"type\":\"Unigram\"",
        "\"type\":\"WordPiece\"",
        "\"dropout\":0.5",
        "\"byte_fallback\":true",
        "\"unk_id\":9",
        "\"continuing_subword_prefix\":\"##\"",
        "\"end_of_word_suffix\":\"</w>\"",
        "\"merges\":[\"a b\"]",
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\",\"invert\":false}",
    ];
    let read = |path: &Path, _: &[u8]| {
        let loaded = Tokenizer::load(&path.display().to_string());
        let read = loaded.and_then(|tokenizer| {
            let tokens = tokenizer.encode("abb a_b \u{e9}\n\0")?;
            let size = tokenizer.vocab_size();
            assert!(tokens.iter().all(|token| (*token as usize) < size));
            tokenizer.decode(&tokens)
        });
        said(read, |_| {})
    };
    of_file("tokenizer", "tokenizer.json", (seeds, words), read)
}

/// The `config.json` of a model folder whose weights are whole.
pub fn model_configuration() -> Target {
    let place = folder();
    let from = fixture("tests/fixtures/llama-gqa");
    let seeds = ["llama-gqa", "qwen3-qknorm", "qwen2-bias"].map(|name| {
        let path = fixture(&format!("tests/fixtures/{name}/config.json"));
        std::fs::read(path).expect("a configuration")
    });
    let weights = "model.safetensors";
    std::fs::copy(from.join(weights), place.path().join(weights)).expect("copies");
    let read = move |input: &[u8]| {
        std::fs::write(place.path().join("config.json"), input).expect("writes");
        said(ModelFolder::open(place.path()), |folder| {
            folder.config().validate().expect("what was read is valid");
        })
    };
    Target {
        name: "model configuration",
        seeds: seeds.to_vec(),
        words: &[
            "\"rope_scaling\":{}",
            "\"head_dim\":",
            "\"qwen2\"",
            "\"mamba\"",
            "null",
            "true",
            "1.5",
        ],
        read: Box::new(read),
    }
}

/// The `adapter_config.json` of an adapter whose weights are whole.
pub fn adapter_configuration() -> Target {
    let place = folder();
    let from = fixture("tests/fixtures/lora-qv/adapter");
    let (weights, config) = ("adapter_model.safetensors", "adapter_config.json");
    std::fs::copy(from.join(weights), place.path().join(weights)).expect("copies");
    let seed = std::fs::read(from.join(config)).expect("a configuration");
    let read = move |input: &[u8]| {
        std::fs::write(place.path().join(config), input).expect("writes");
        said(AdapterFolder::open(place.path()), |adapter| {
            let same = adapter.check_scale(adapter.config());
            same.expect("an adapter has the scale of its own configuration");
        })
    };
    Target {
        name: "adapter configuration",
        seeds: vec![seed],
        words: &[
            "\"r\": 0,",
            "\"lora_alpha\": 1e300,",
            "\"use_rslora\": true,",
            "\"target_modules\": \"all-linear\",",
            "null",
            "[]",
        ],
        read: Box::new(read),
    }
}

/// The metrics of a run, from which its page is drawn.
pub fn metrics() -> Target {
    let line = |step: u64| {
        format!(
            "{{\"step\":{step},\"loss\":1.5,\"loss_bits\":\"3fc00000\",\"grad_norm\":2.0,\"lr\":0.001,\"applied\":true,\
             \"dropped\":[],\"scored\":7,\"tokens_per_s\":128.0,\"elapsed_s\":1.5,\"phase\":\"replayed\",\"root\":\"ab\",\
             \"validation\":{{\"loss\":1.0,\"perplexity\":2.7,\"accuracy\":0.5,\"scored\":3}},\
             \"group_norms\":{{\"layer 0\":1.0}}}}\n"
        )
    };
    let seed = (0..4).map(line).collect::<String>().into_bytes();
    let words: &[&str] = &["\"layer 9\":", "null", "1e308", "-1e308", "1e-320", "\n"];
    let read = |path: &Path, _: &[u8]| {
        let folder = path.parent().expect("a folder");
        said(RunHistory::read(folder), |run| {
            let runs = [run.clone(), run];
            let report = bitstep::report::page::Report::new(&runs);
            let page = report.html();
            assert!(page.ends_with("</html>\n") && !page.contains("NaN"));
        })
    };
    of_file("metrics", "metrics.jsonl", (vec![seed], words), read)
}
