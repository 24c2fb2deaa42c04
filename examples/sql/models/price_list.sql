-- The prices as of 2 March 2026, 12:00 UTC, by what is known now.
select product, price, valid_from
from prices_versions
where valid_from <= timestamptz '2026-03-02 12:00:00+00'
  and (valid_to > timestamptz '2026-03-02 12:00:00+00' or valid_to is null)
  and not is_tombstone
order by product
