"""The formats of our files: layouts, catalogs, manifests, DCP metadata, checksums, names.

The room imports `common`, `errors` and values of `policy`. It reads and writes no files.

Read it in this order:

- `names`: names of files and directories, in memory and on storage.
- `layout`, `frames`: where the items of a segment lie, and what `torch.save` puts around each.
- `checksums`: CRC32C of blocks of a segment.
- `byte_items`: the streams of what is no tensor.
- `saved_streams`: whether a stream is what `torch.save` wrote.
- `segments`, `manifest`: which segments a checkpoint consists of, and the other JSON records.
- `catalog`: what a checkpoint consists of, item by item. A catalog is written as a `column_file`;
  its rows are stored as `shared_runs`: of many, only those are made that somebody asks for.
  `locations` finds its items in the segments, and its distinct shapes.
- `torch_names`, `metadata`, `catalog_conversion`: between catalogs and DCP's own objects.
- `sizes`: what a file claims, held against what there is.
- `metadata_template`: DCP's `.metadata` as bytes, written from a catalog without making the objects
  that it is a pickle of.
- `history`, `recoveries`: files for people, with a line for each checkpoint or load.
"""
