//! Draws a run: bars of all candidates for each measurement, as a share of gocryptfs (or of the
//! first candidate without it).

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::Deserialize;

const BAR: i32 = 11;
const GAP: i32 = 16;
const LEFT: i32 = 330;
const RIGHT: i32 = 60;
const TOP: i32 = 46;
const WIDTH: i32 = 960;
/// Maximum share drawn; longer bars are cut and keep their label.
const MOST: f64 = 8.0;

const COLOURS: [RGBColor; 6] = [
    RGBColor(170, 170, 170),
    RGBColor(215, 215, 205),
    RGBColor(224, 160, 80),
    RGBColor(200, 120, 120),
    RGBColor(150, 130, 180),
    RGBColor(60, 120, 180),
];

/// Draw bench/results/latest.json as SVG
#[derive(Parser)]
struct Arguments {
    run: PathBuf,
    svg: PathBuf,
}

#[derive(Deserialize)]
struct Run {
    candidates: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    measurement: String,
    median: std::collections::HashMap<String, f64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let run: Run = serde_json::from_slice(&std::fs::read(&arguments.run)?)?;
    let group = run.candidates.len() as i32 * BAR + GAP;
    let height = TOP + group * run.rows.len() as i32 + 10;
    let root = SVGBackend::new(&arguments.svg, (WIDTH as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    draw(&run, group, &root)?;
    root.present()?;
    Ok(())
}

fn draw(
    run: &Run,
    group: i32,
    root: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
) -> Result<(), Box<dyn Error>> {
    let base = run.candidates.iter().find(|name| *name == "gocryptfs").or(run.candidates.first());
    let Some(base) = base else { return Err("a run without candidates".into()) };
    let label = ("sans-serif", 12).into_font().color(&BLACK).pos(Pos::new(HPos::Right, VPos::Center));
    let plain = ("sans-serif", 12).into_font().color(&BLACK).pos(Pos::new(HPos::Left, VPos::Center));
    let scale = f64::from(WIDTH - LEFT - RIGHT) / MOST;
    let x = |share: f64| LEFT + (share.min(MOST) * scale) as i32; // at most the width
    for (index, name) in run.candidates.iter().enumerate() {
        let at = LEFT + 95 * index as i32;
        root.draw(&Rectangle::new([(at, 12), (at + 10, 22)], colour(index, name).filled()))?;
        root.draw(&Text::new(name.clone(), (at + 14, 17), plain.clone()))?;
    }
    root.draw(&Text::new(format!("share of {base}; longer is faster"), (8, 17), plain.clone()))?;
    for (number, row) in run.rows.iter().enumerate() {
        let top = TOP + number as i32 * group;
        let middle = top + run.candidates.len() as i32 * BAR / 2;
        root.draw(&Text::new(row.measurement.clone(), (LEFT - 8, middle), label.clone()))?;
        let whole = row.median.get(base).copied().unwrap_or(1.0);
        for (index, name) in run.candidates.iter().enumerate() {
            let Some(value) = row.median.get(name) else { continue };
            let (from, share) = (top + index as i32 * BAR, value / whole);
            let bar = Rectangle::new([(LEFT, from), (x(share), from + BAR - 2)], colour(index, name).filled());
            root.draw(&bar)?;
            root.draw(&Text::new(format!("{share:.2}"), (x(share) + 4, from + BAR / 2), plain.clone()))?;
        }
    }
    let bottom = TOP + group * run.rows.len() as i32 - GAP;
    root.draw(&PathElement::new(vec![(x(1.0), TOP - 4), (x(1.0), bottom)], BLACK.stroke_width(1)))?;
    Ok(())
}

/// Returns the colour of a candidate; lockbox always has the last one.
fn colour(index: usize, name: &str) -> RGBColor {
    if name == "lockbox" { COLOURS[COLOURS.len() - 1] } else { COLOURS[index % (COLOURS.len() - 1)] }
}
