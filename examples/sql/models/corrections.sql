-- Each row of the join that a late price has corrected, from the log of the join.
select
  order_id,
  product,
  old.price as was,
  price as became,
  quantity * (coalesce(price, 0) - coalesce(old.price, 0)) as revenue
from priced_orders_log
where old is not null
order by order_id, revision
