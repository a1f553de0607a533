//! Formats whose names and help are rows of a table.

/// The names of the variants of a format. `FORMATS` has a row for each, in their order, which `$row` returns.
macro_rules! named_formats {
    ($(#[$about:meta])* $format:ident, $count:literal from $first:ident by $row:ident) => {
        impl $format {
            /// Number of formats.
            const COUNT: usize = $count;

            $(#[$about])*
            pub const ALL: [Self; Self::COUNT] = {
                let mut all = [Self::$first; Self::COUNT];
                let mut i = 0;
                while i < Self::COUNT {
                    all[i] = FORMATS[i].format;
                    i += 1;
                }
                all
            };

            /// The name that can be given for it.
            pub fn name(self) -> &'static str {
                self.$row().name
            }
        }

        #[cfg(feature = "clap")]
        impl clap::ValueEnum for $format {
            fn value_variants<'a>() -> &'a [Self] {
                &Self::ALL
            }

            fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
                let row = self.$row();
                let value = clap::builder::PossibleValue::new(row.name).help(row.help);
                Some(value.aliases(row.aliases.iter().copied()))
            }
        }
    };
}
pub(super) use named_formats;
