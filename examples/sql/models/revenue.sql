-- Revenue of each product: the current rows of the join, each with the price of its time.
select product, count(*) as orders, sum(quantity * price) as revenue
from priced_orders
group by product
order by product
