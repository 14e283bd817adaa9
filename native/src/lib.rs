//! The native core of delta-prop: what is done for each row and each frame, without I/O and without a clock.
//!
//! `wire/delta_prop_wire/core.py` describes the boundary. The Python modules behind it are the definition: the core
//! gives the same results, and leaves to them whatever is invalid or unusual. Only `python` needs Python.

pub mod body;
pub mod fold;
pub mod frames;
pub mod heads;
pub mod names;
#[cfg(feature = "python")]
mod python;
pub mod run;
pub mod spec;
pub mod vectors;
