"""Host memory with a fault, to show that the bed finds it."""

from dataclasses import replace

from host_memory_spec import Copy, HostMemory, HostMemorySpec


class SwapsTwoBlocks(HostMemory):
    def perform(self, copy: Copy) -> int:
        """Loads the first and the last block of each group into each other's place."""
        pages = list(copy.pages)
        if not copy.is_store:
            for group in range(len(self.tensors)):
                mine = [i for i, page in enumerate(pages) if page.group == group]
                if len(mine) > 1:
                    i, j = mine[0], mine[-1]
                    blocks = pages[i].block, pages[j].block
                    pages[j] = pages[j]._replace(block=blocks[0])
                    pages[i] = pages[i]._replace(block=blocks[1])
        return super().perform(replace(copy, pages=pages))


class LosesABlock(HostMemory):
    def perform(self, copy: Copy) -> int:
        return super().perform(replace(copy, pages=copy.pages[:-1]))


class CopiesLate(HostMemory):
    """Reports a copy one step before it is done."""

    late: tuple[Copy, ...] = ()

    def perform(self, copy: Copy) -> int:
        self.late += (copy,)
        return sum(sum(self.tensors[page.group].values()) for page in copy.pages)

    def poll(self, is_store: bool) -> list:
        late, self.late = self.late, ()
        for copy in late:
            if copy.is_store == is_store:
                super().perform(copy)
            else:
                self.late += (copy,)
        return super().poll(is_store)


class OneWrongBlock(HostMemory):
    """The n-th load gets its n-th block from the place of another block."""

    loads = 0
    blocks_in_load = 0

    def perform(self, copy: Copy) -> int:
        pages = list(copy.pages)
        if not copy.is_store:
            self.blocks_in_load = len(pages)
            page = pages[self.loads % len(pages)]
            group = [other for other in pages if other.group == page.group]
            others = group if len(group) > 1 else pages
            other = others[others.index(page) - 1]
            pages[pages.index(page)] = page._replace(chunk=other.chunk, place=other.place)
            self.loads += 1
        return super().perform(replace(copy, pages=pages))


class SwapsTwoBlocksSpec(HostMemorySpec):
    memory_class = SwapsTwoBlocks


class LosesABlockSpec(HostMemorySpec):
    memory_class = LosesABlock


class CopiesLateSpec(HostMemorySpec):
    memory_class = CopiesLate


class OneWrongBlockSpec(HostMemorySpec):
    memory_class = OneWrongBlock
