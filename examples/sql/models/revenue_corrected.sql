-- Of the revenue of each product, how much came with corrections: a model of two models.
with corrected as (
  select product, sum(revenue) as later from corrections group by product
)
select product, revenue, revenue - coalesce(later, 0) as at_first
from revenue left join corrected using (product)
order by product
