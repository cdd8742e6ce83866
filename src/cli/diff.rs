//! `bitstep diff`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::Outcome;
use super::diff_devices::DeviceOptions;
use crate::error::{ExitCode, GoldenError};
use crate::golden::bless::compare_bits;
use crate::golden::compare::compare;
use crate::golden::{GoldenFile, Verdict};
use crate::manifest::Manifest;

/// Differences of a manifest that are shown.
const MOST: usize = 5;

/// The line that begins the part of a manifest file that is not hashed.
const EXECUTION: &str = "execution";

/// Arguments of `bitstep diff`.
#[derive(Args, Debug)]
pub struct Diff {
    /// A golden, a manifest, or a run folder that holds manifest.txt; with --devices a recipe
    #[arg(value_name = "LEFT|RECIPE")]
    left: PathBuf,
    /// Another of the same kind
    #[arg(required_unless_present = "devices", conflicts_with = "devices")]
    right: Option<PathBuf>,
    #[command(flatten)]
    devices: DeviceOptions,
}

impl Diff {
    /// Compares the two files, or the two devices.
    pub fn run(self) -> Outcome {
        let Some(right) = &self.right else {
            return self.devices.run(self.left);
        };
        let (left, right) = (read(&self.left)?, read(right)?);
        match (left.kind, right.kind) {
            (Kind::Golden, Kind::Golden) => goldens(&left, &right),
            (Kind::Manifest, Kind::Manifest) => Ok(manifests(&left, &right)),
            (a, b) => Err(GoldenError::DifferentKinds {
                left: left.path,
                left_kind: a.name(),
                right: right.path,
                right_kind: b.name(),
            }
            .into()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Golden,
    Manifest,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Golden => "golden",
            Kind::Manifest => "manifest",
        }
    }

    /// The kind of a text, by the header lines that only one kind has.
    fn of(text: &str) -> Option<Self> {
        text.lines().take(8).find_map(|line| {
            let word = line.split(' ').next().unwrap_or_default();
            match word {
                "recipe" | "because" => Some(Kind::Golden),
                "arena" | "slots" => Some(Kind::Manifest),
                _ => None,
            }
        })
    }
}

struct Side {
    path: String,
    text: String,
    kind: Kind,
}

fn read(path: &Path) -> Result<Side, GoldenError> {
    let path = match path.is_dir() {
        true => path.join("manifest.txt"),
        false => path.to_path_buf(),
    };
    let name = path.display().to_string();
    let text = std::fs::read_to_string(&path).map_err(|source| GoldenError::File {
        action: "read",
        path: name.clone(),
        source,
    })?;
    match Kind::of(&text) {
        Some(kind) => Ok(Side {
            path: name,
            text,
            kind,
        }),
        None => Err(GoldenError::UnknownKind { path: name }),
    }
}

fn goldens(left: &Side, right: &Side) -> Outcome {
    let a = GoldenFile::parse(&left.text, &left.path)?;
    let b = GoldenFile::parse(&right.text, &right.path)?;
    say!("expected {}\nfound    {}", left.path, right.path);
    match compare(&a, &b) {
        Verdict::Identical => {
            say!("identical: every bit that the goldens cover");
            if a.because != b.because {
                say!("note: the reasons differ: {:?}, {:?}", a.because, b.because);
            }
            Ok(ExitCode::Done)
        }
        Verdict::Differs(difference) => {
            say!("{}", difference.to_string().trim_end());
            match compare_bits(&a, &b) {
                Verdict::Identical => say!("  every bit below the header is the same"),
                Verdict::Differs(bits) if bits != difference => {
                    say!("below the header it {}", bits.to_string().trim_end());
                }
                Verdict::Differs(_) => {}
            }
            Ok(ExitCode::Differs)
        }
    }
}

fn manifests(left: &Side, right: &Side) -> ExitCode {
    say!("left  {}\nright {}", left.path, right.path);
    let (a, a_execution) = split(&left.text);
    let (b, b_execution) = split(&right.text);
    if a != b {
        say!("the programs differ (hashed part):");
        print_lines(a, b, 0);
        return ExitCode::Differs;
    }
    say!("identical: the programs (hashed part)");
    if a_execution != b_execution {
        say!("note: only the execution section differs: the same program, computed otherwise:");
        print_lines(a_execution, b_execution, a.lines().count());
    }
    ExitCode::Done
}

/// The hashed part and the execution section.
fn split(text: &str) -> (&str, &str) {
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        if line.starts_with(EXECUTION) {
            break;
        }
        start += line.len();
    }
    text.split_at(start)
}

/// Prints the first lines that differ; `before` lines stand above both parts in their files.
fn print_lines(left: &str, right: &str, before: usize) {
    let differences = Manifest::diff(left, right, MOST + 1);
    for (number, a, b) in differences.iter().take(MOST) {
        say!("  line {}", before + number);
        say!("    left  {}", a.trim_start());
        say!("    right {}", b.trim_start());
    }
    if differences.len() > MOST {
        say!("  and more");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_recognised_by_its_header() {
        assert_eq!(
            Kind::of("schema 1\ncontract 1\ndomain f32\nrecipe ab"),
            Some(Kind::Golden)
        );
        assert_eq!(
            Kind::of("schema 1\ncontract 1\ndomain f32\narena 3 bytes"),
            Some(Kind::Manifest)
        );
        assert_eq!(Kind::of("name = \"sums\""), None);
    }

    #[test]
    fn the_execution_section_is_not_part_of_the_program() {
        let text = "schema 1\ncalls\n  0 embed\nexecution cpu\n  0 kernel\n";
        let (program, execution) = split(text);
        assert_eq!(program, "schema 1\ncalls\n  0 embed\n");
        assert_eq!(execution, "execution cpu\n  0 kernel\n");
        assert_eq!(split("schema 1\n"), ("schema 1\n", ""));
    }
}
