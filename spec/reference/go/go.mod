module store_proxy

go 1.19
