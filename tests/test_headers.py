"""Headers: fields as UniProt, UniRef and NCBI write them, and no text that makes the parser fail."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protperf.formats.headers import Header, parse_header

# headers as https://www.uniprot.org/help/fasta-headers shows them, and forms met in real files
EXAMPLES = {
    "sp|Q8I6R7|ACN2_ACAGO Acanthoscurrin-2 (Fragment) OS=Acanthoscurria gomesiana OX=115339 GN=acantho2 PE=1 SV=1": Header(
        "sp|Q8I6R7|ACN2_ACAGO",
        "sp",
        "Q8I6R7",
        "ACN2_ACAGO",
        "Acanthoscurrin-2 (Fragment)",
        "Acanthoscurria gomesiana",
        115339,
        "acantho2",
        1,
        1,
        True,
    ),
    "sp|P27748|ACOX_CUPNH Acetoin catabolism protein X "
    "OS=Cupriavidus necator (strain ATCC 17699 / H16 / DSM 428 / Stanier 337) OX=381666 GN=acoX PE=4 SV=2": Header(
        "sp|P27748|ACOX_CUPNH",
        "sp",
        "P27748",
        "ACOX_CUPNH",
        "Acetoin catabolism protein X",
        "Cupriavidus necator (strain ATCC 17699 / H16 / DSM 428 / Stanier 337)",
        381666,
        "acoX",
        4,
        2,
    ),
    "sp|Q4R572-2|1433B_MACFA Isoform Short of 14-3-3 protein beta/alpha OS=Macaca fascicularis OX=9541 GN=YWHAB": Header(
        "sp|Q4R572-2|1433B_MACFA",
        "sp",
        "Q4R572-2",
        "1433B_MACFA",
        "Isoform Short of 14-3-3 protein beta/alpha",
        "Macaca fascicularis",
        9541,
        "YWHAB",
    ),
    "sp|O64332|TIPL_TEST Tail tip protein L OS=Escherichia phage N15 OX=1604876 GN=gene 18 PE=3 SV=1": Header(
        "sp|O64332|TIPL_TEST",
        "sp",
        "O64332",
        "TIPL_TEST",
        "Tail tip protein L",
        "Escherichia phage N15",
        1604876,
        "gene 18",
        3,
        1,
    ),
    "tr|A0A000|A0A000_TEST Rubber factor OS=Hevea brasiliensis PE=1 SV=2 Split=0 ": Header(
        "tr|A0A000|A0A000_TEST",
        "tr",
        "A0A000",
        "A0A000_TEST",
        "Rubber factor",
        "Hevea brasiliensis",
        evidence=1,
        version=2,
    ),
    "UniRef50_Q9K794 Putative AgrB-like protein n=2 Tax=Bacillus TaxID=1386 RepID=AGRB_BACHD": Header(
        "UniRef50_Q9K794",
        "UniRef50",
        "Q9K794",
        "AGRB_BACHD",
        "Putative AgrB-like protein",
        "Bacillus",
        1386,
    ),
    "UniRef90_A0A5A9P0L4": Header("UniRef90_A0A5A9P0L4", "UniRef90", "A0A5A9P0L4"),
    "gi|108861911|sp|Q8WZ42.4|TITIN_HUMAN RecName: Full=Titin": Header(
        "gi|108861911|sp|Q8WZ42.4|TITIN_HUMAN",
        "sp",
        "Q8WZ42.4",
        "TITIN_HUMAN",
        "RecName: Full=Titin",
    ),
    "gi|671626|emb|CAA85685.1| rubisco large subunit": Header(
        "gi|671626|emb|CAA85685.1|", "emb", "CAA85685.1", "", "rubisco large subunit"
    ),
    "pir||A45388 kinase": Header("pir||A45388", "pir", "A45388", "A45388", "kinase"),
    "gnl|BL_ORD_ID|0 x": Header("gnl|BL_ORD_ID|0", "gnl", "0", "", "x"),
    "contam_sp|ALBU_BOVIN|": Header("contam_sp|ALBU_BOVIN|", "contam_sp", "ALBU_BOVIN"),
    "sp|lab_Q8AAB1| GLMS_TEST aminotransferase [isomerizing] OS=Bacteroides (strain ATCC 1 / DSM 2) GN=glmS PE=3 SV=2": Header(
        "sp|lab_Q8AAB1|",
        "sp",
        "lab_Q8AAB1",
        "",
        "GLMS_TEST aminotransferase [isomerizing]",
        "Bacteroides (strain ATCC 1 / DSM 2)",
        gene="glmS",
        evidence=3,
        version=2,
    ),
    "mimic|Random_P84243_1|shuffle_1": Header(
        "mimic|Random_P84243_1|shuffle_1", accession="mimic|Random_P84243_1|shuffle_1"
    ),
    "CHIP0001 | ACU1 | dnaA": Header("CHIP0001", accession="CHIP0001", description="| ACU1 | dnaA"),
    "sp||": Header("sp||", "sp", "sp||"),
    "": Header(""),
}


@pytest.mark.parametrize(("text", "expected"), EXAMPLES.items())
def test_each_known_form_gives_its_fields(text, expected):
    assert parse_header(text) == expected


@given(st.text() | st.text("spgitrOXSGNPEV|=_ 0123456789(Fragment)UniRef90nTaxID\t"))
def test_no_text_makes_the_parser_fail(text):
    header = parse_header(text)
    words = [word for word in re.split(r"[ \t\n\r\v\f]+", text) if word]
    assert header.id == (words[0] if words else "")
    assert bool(header.accession) == bool(words)


def test_a_number_of_5000_digits_is_no_crash():
    assert parse_header("q1 x OX=" + "9" * 5000).taxon_id is not None


def test_real_headers_keep_organism_and_gene(shared_dir):
    import gzip

    with gzip.open(
        shared_dir / "data/sequences/yeast_UP000002311_559292.fasta.gz", "rt", encoding="utf-8"
    ) as lines:
        headers = [parse_header(line[1:]) for line in lines if line.startswith(">")]
    assert len(headers) == 6059
    assert {header.taxon_id for header in headers} == {559292}
    assert {header.organism for header in headers} == {
        "Saccharomyces cerevisiae (strain ATCC 204508 / S288c)"
    }
    assert all(header.database in ("sp", "tr") and header.evidence and header.version for header in headers)
