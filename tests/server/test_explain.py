from tests.server.test_auth import bearer

KEY, OTHER = "sk-one", "sk-two"


async def test_a_request_is_explained_in_its_answer_and_afterwards_to_its_key_alone(start):
    server = await start(api_keys=(KEY, OTHER))
    body = {"prompt": "ABC", "max_tokens": 1, "explain": True}
    answer = (await server.post(body, headers=bearer(KEY))).body
    (explained,) = answer["explain"]
    assert explained["request_id"] == f"{answer['id']}-0"
    path = f"/v1/requests/{answer['id']}"
    found = await server.get(path, headers=bearer(KEY))
    assert found.body["prompts"] == [explained]
    assert (await server.get(path, headers=bearer(OTHER))).status == 404
    assert (await server.get("/v1/requests/cmpl-none", headers=bearer(KEY))).status == 404


async def test_an_answer_that_did_not_ask_is_not_explained(start):
    server = await start()
    answer = (await server.post({"prompt": "ABC", "max_tokens": 1})).body
    assert "explain" not in answer
